variable "subscription_id" {
  description = "Id of the Azure subscription."
  type        = string
}

variable "location" {
  description = "Region. It must have the machine type."
  type        = string
  default     = "eastus"
}

variable "name" {
  description = "Name of resource group and cluster; prefix of other names."
  type        = string
  default     = "finetune"
  validation {
    condition     = can(regex("^[a-z][a-z0-9]{1,11}$", var.name))
    error_message = "name: 2 to 12 lower-case letters and digits, a letter first."
  }
}

variable "unique_suffix" {
  description = "Makes the names of storage account and registry unique in all of Azure: 3 to 8 lower-case letters and digits."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9]{3,8}$", var.unique_suffix))
    error_message = "unique_suffix: 3 to 8 lower-case letters and digits."
  }
}

variable "gpu_pool" {
  description = <<-EOT
    GPU nodes, which start with a run and are removed after it. max_nodes: in all. spot_nodes: of a second pool, on spot,
    for runs on one node. capacity_reservation_group_id: a group of reserved machines that the nodes use.
  EOT
  type = object({
    vm_size                       = string
    max_nodes                     = number
    spot_nodes                    = optional(number, 0)
    capacity_reservation_group_id = optional(string)
  })
  validation {
    condition     = contains(keys(local.machines), var.gpu_pool.vm_size)
    error_message = "gpu_pool.vm_size: not an Azure machine of estimator/data/instances.csv; `finetune gpus` lists them."
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

variable "key_vault_secret_ids" {
  description = "Resource ids of secrets in a key vault with Azure RBAC that runs may read, such as one with HF_TOKEN for gated models."
  type        = list(string)
  default     = []
}

variable "budget" {
  description = "Alarm for the resource group's monthly cost, at 80 % and when the forecast exceeds it. start: first day of a month. Null: none."
  type        = object({ monthly_usd = number, start = string, emails = list(string) })
  default     = null
  validation {
    condition     = var.budget == null ? true : can(regex("^[0-9]{4}-[0-9]{2}-01$", var.budget.start)) && length(var.budget.emails) > 0
    error_message = "budget: start is the first day of a month, such as 2026-12-01, and emails names somebody."
  }
}
