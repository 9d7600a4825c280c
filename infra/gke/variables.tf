variable "project" {
  description = "Id of the Google Cloud project."
  type        = string
}

variable "region" {
  description = "Region of bucket, registry and networks."
  type        = string
  default     = "us-central1"
}

variable "zone" {
  description = "Zone of the cluster and its GPU nodes. It must have the machine type."
  type        = string
  default     = "us-central1-a"
  validation {
    condition     = startswith(var.zone, "${var.region}-")
    error_message = "zone: a zone of the region, such as us-central1-a."
  }
}

variable "name" {
  description = "Prefix of all names, and the cluster's name."
  type        = string
  default     = "finetune"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "name: 2 to 20 lower-case letters, digits and dashes, a letter first."
  }
}

variable "gpu_pool" {
  description = <<-EOT
    GPU nodes, which start with a run and are removed after it. max_nodes: in all. spot_nodes: of a second pool, on spot,
    without the GPU networks, for runs on one node. reservation: name of a reservation in the zone that the nodes use.
  EOT
  type = object({
    machine_type = string
    max_nodes    = number
    spot_nodes   = optional(number, 0)
    reservation  = optional(string)
  })
  validation {
    condition     = contains(["a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "a3-megagpu-8g"], var.gpu_pool.machine_type)
    error_message = "gpu_pool.machine_type: a2-highgpu-8g, a2-ultragpu-8g, a3-highgpu-8g or a3-megagpu-8g."
  }
  validation {
    condition     = var.gpu_pool.max_nodes >= 1 && contains(range(var.gpu_pool.max_nodes), var.gpu_pool.spot_nodes)
    error_message = "gpu_pool: max_nodes is at least 1, and spot_nodes is less than it."
  }
}

variable "api_networks" {
  description = "CIDR blocks that may reach the API server: your own networks."
  type        = list(string)
  validation {
    condition     = length(var.api_networks) > 0 && alltrue([for block in var.api_networks : can(cidrhost(block, 0)) && block != "0.0.0.0/0"])
    error_message = "api_networks: CIDR blocks such as 198.51.100.0/24, not 0.0.0.0/0."
  }
}

variable "secret_ids" {
  description = "Ids of secrets in Secret Manager that runs may read, such as one with HF_TOKEN for gated models."
  type        = list(string)
  default     = []
}

variable "budget" {
  description = "Alarm for the project's monthly cost, at 80 % and when the forecast exceeds it; mails the billing account's administrators. Null: none."
  type        = object({ billing_account = string, monthly_usd = number })
  default     = null
}
