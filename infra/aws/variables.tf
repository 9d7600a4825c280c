variable "name" {
  description = "Prefix of all names."
  type        = string
  default     = "finetune"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,19}$", var.name))
    error_message = "name: 2 to 20 lower-case letters, digits and dashes, a letter first."
  }
}

variable "tags" {
  description = "Further tags of all resources."
  type        = map(string)
  default     = {}
}

variable "bucket_name" {
  description = "Of the datastore. Null: NAME-datastore-ACCOUNT-REGION."
  type        = string
  default     = null
  validation {
    condition     = var.bucket_name == null ? true : can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name: 3 to 63 lower-case letters, digits and dashes."
  }
}

variable "network" {
  description = <<-EOT
    vpc_id and subnet_ids: an existing VPC and private subnets of it that reach the internet through a NAT gateway;
    the first one takes the runs on several nodes. Without vpc_id a VPC is made, with a private subnet in each of
    zones (none named: the first two of the region), one NAT gateway and an S3 endpoint.
  EOT
  type = object({
    vpc_id     = optional(string)
    subnet_ids = optional(list(string), [])
    cidr       = optional(string, "10.72.0.0/16")
    zones      = optional(list(string), [])
  })
  default = {}
  validation {
    condition     = (var.network.vpc_id == null) == (length(var.network.subnet_ids) == 0)
    error_message = "network: vpc_id and subnet_ids belong together: give both, or neither for a new VPC."
  }
  validation {
    condition     = can(cidrsubnet(var.network.cidr, 4, 15))
    error_message = "network.cidr is no address block such as 10.72.0.0/16."
  }
}

variable "gpu_pools" {
  description = <<-EOT
    One for each type of GPU machine; the key is part of its queues' names. EFA interfaces and vCPUs follow from
    instance_type. max_nodes: machines in all. spot_nodes: how many of them are spot machines, which single-node runs
    use first; multi-node runs get the others. capacity_reservation_id: of an On-Demand Capacity Reservation or a
    Capacity Block. image_id: an AMI of yours in place of gpu_image_type's; it needs the ECS agent, NVIDIA's driver and
    container toolkit, and for several nodes EFA's driver (`finetune check` tests EFA and GPUDirect).
    placement_group: the nodes of a run near each other; off where a reservation is in a group of its own.
    instance_store: the machine's own NVMe disks, where it has some, take what jobs write (weights, checkpoints).
    disk_mib_per_s: of the gp3 disk, which takes it where there are none.
  EOT
  type = map(object({
    instance_type           = string
    max_nodes               = number
    spot_nodes              = optional(number, 0)
    image_id                = optional(string)
    instance_store          = optional(bool, true)
    disk_gib                = optional(number, 500)
    disk_mib_per_s          = optional(number, 1000)
    placement_group         = optional(bool, true)
    capacity_reservation_id = optional(string)
    capacity_block          = optional(bool, false)
  }))
  validation {
    condition     = alltrue([for key in keys(var.gpu_pools) : can(regex("^[a-z0-9][a-z0-9-]{0,19}$", key))])
    error_message = "gpu_pools: a key is 1 to 20 lower-case letters, digits and dashes, such as h100."
  }
  validation {
    condition     = alltrue([for key in keys(var.gpu_pools) : key != "cpu" && !endswith(key, "-single")])
    error_message = "gpu_pools: a key is not cpu and does not end in -single, as queues of those names are there already."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : contains(keys(local.machines), pool.instance_type)])
    error_message = "gpu_pools: not every instance_type is an AWS machine of estimator/data/instances.csv; `finetune gpus` lists them."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.max_nodes >= 1 && floor(pool.max_nodes) == pool.max_nodes])
    error_message = "gpu_pools: max_nodes is a whole number from 1 up."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : contains(range(max(1, floor(pool.max_nodes))), pool.spot_nodes)])
    error_message = "gpu_pools: spot_nodes is a whole number from 0 up and less than max_nodes."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.image_id == null ? true : can(regex("^ami-[0-9a-f]+$", pool.image_id))])
    error_message = "gpu_pools: image_id is the id of an AMI, such as ami-0123456789abcdef0."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.disk_gib >= 100])
    error_message = "gpu_pools: disk_gib is at least 100: images with CUDA take 20 to 30 GiB, weights and checkpoints the rest."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.disk_mib_per_s >= 125 && pool.disk_mib_per_s <= 1000])
    error_message = "gpu_pools: disk_mib_per_s is from 125 to 1000, as gp3 has it."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : !pool.capacity_block || pool.capacity_reservation_id != null])
    error_message = "gpu_pools: capacity_block needs its capacity_reservation_id."
  }
  validation {
    condition     = alltrue([for pool in values(var.gpu_pools) : pool.spot_nodes == 0 || pool.capacity_reservation_id == null])
    error_message = "gpu_pools: a reservation is no spot capacity: give spot_nodes or capacity_reservation_id."
  }
}

variable "capacity_hours" {
  description = "A job that no machine can be had for is canceled after so long, for the next in its queue."
  type        = number
  default     = 12
  validation {
    condition     = var.capacity_hours >= 1 && var.capacity_hours <= 24 && floor(var.capacity_hours) == var.capacity_hours
    error_message = "capacity_hours: a whole number from 1 to 24."
  }
}

variable "deleted_kept_days" {
  description = "So long the datastore keeps what was deleted or written over: checkpoints, too, which cost."
  type        = number
  default     = 7
  validation {
    condition     = var.deleted_kept_days >= 1
    error_message = "deleted_kept_days: at least 1."
  }
}

variable "cpu_max_vcpus" {
  description = "For steps without GPUs."
  type        = number
  default     = 64
  validation {
    condition     = var.cpu_max_vcpus >= 2
    error_message = "cpu_max_vcpus: at least 2."
  }
}

variable "cpu_disk_gib" {
  description = "Of a machine for steps without GPUs: one of them fetches the weights."
  type        = number
  default     = 500
  validation {
    condition     = var.cpu_disk_gib >= 50
    error_message = "cpu_disk_gib: at least 50."
  }
}

variable "cpu_disk_mib_per_s" {
  description = "Of that disk."
  type        = number
  default     = 500
  validation {
    condition     = var.cpu_disk_mib_per_s >= 125 && var.cpu_disk_mib_per_s <= 1000
    error_message = "cpu_disk_mib_per_s: from 125 to 1000, as gp3 has it."
  }
}

variable "batch_service_role_arn" {
  description = "Null: Batch's own service-linked role, which it makes with the first compute environment."
  type        = string
  default     = null
}

variable "gpu_image_type" {
  description = "Of the ECS-optimized image of GPU nodes."
  type        = string
  default     = "ECS_AL2023_NVIDIA"
  validation {
    condition     = contains(["ECS_AL2023_NVIDIA", "ECS_AL2_NVIDIA"], var.gpu_image_type)
    error_message = "gpu_image_type: ECS_AL2023_NVIDIA or ECS_AL2_NVIDIA."
  }
}

variable "metadata_service_url" {
  description = "Metaflow's metadata service, which runs on several nodes need on Batch. Null: none yet."
  type        = string
  default     = null
  validation {
    condition     = var.metadata_service_url == null ? true : can(regex("^https?://[^ ]+$", var.metadata_service_url))
    error_message = "metadata_service_url: an address that begins with http:// or https://."
  }
}

variable "kms_key_arn" {
  description = "Encrypts the datastore. Null: S3's own keys."
  type        = string
  default     = null
  validation {
    condition     = var.kms_key_arn == null ? true : can(regex("^arn:[a-z-]+:kms:", var.kms_key_arn))
    error_message = "kms_key_arn: the ARN of a KMS key."
  }
}

variable "job_logs" {
  description = <<-EOT
    The log group /aws/batch/job, which all Batch jobs of an account and region share. create: false if it exists
    already. retention_days: as CloudWatch Logs has it (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, ...).
    kms_key_arn: a key whose policy lets logs.REGION.amazonaws.com use it; null: CloudWatch's own encryption.
  EOT
  type = object({
    create         = optional(bool, true)
    retention_days = optional(number, 30)
    kms_key_arn    = optional(string)
  })
  default = {}
  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.job_logs.retention_days)
    error_message = "job_logs.retention_days: one of CloudWatch's periods, such as 7, 30, 90 or 365."
  }
}

variable "secret_arns" {
  description = <<-EOT
    Full ARNs of secrets in AWS Secrets Manager that jobs may read, such as one with HF_TOKEN for gated models. Secrets
    with a key of their own can be read if that key is kms_key_arn.
  EOT
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for arn in var.secret_arns : can(regex("^arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[^*?]+$", arn))])
    error_message = "secret_arns: full ARNs of secrets without wildcards; `aws secretsmanager describe-secret --secret-id NAME` prints one."
  }
}

variable "launchers_register_definitions" {
  description = "Whether launcher_policies include definitions_policy, by which launchers can be root on the machines. false: somebody with definitions_policy launches each image, number of nodes and size of shared memory once before others can."
  type        = bool
  default     = true
}

variable "nightly_check" {
  description = "Runs flows/checklist_flow.py on the nodes of a pool. The schedule is EventBridge's: cron with six fields, in UTC."
  type = object({
    pool     = string
    nodes    = optional(number, 2)
    profile  = optional(string, "standard")
    schedule = optional(string, "cron(0 3 * * ? *)")
    image    = string # target launcher of infra/docker/Dockerfile: starts the flow
    on_nodes = string # target train of infra/docker/Dockerfile: runs on the nodes
    # After so long without a check, alert_emails hear of it; at most a week, as CloudWatch looks no further back.
    silent_hours = optional(number, 36)
  })
  default = null
  validation {
    condition     = var.nightly_check == null ? true : contains(keys(var.gpu_pools), var.nightly_check.pool)
    error_message = "nightly_check.pool is no key of gpu_pools."
  }
  validation {
    condition     = var.nightly_check == null ? true : try(var.nightly_check.nodes <= var.gpu_pools[var.nightly_check.pool].max_nodes - var.gpu_pools[var.nightly_check.pool].spot_nodes, true)
    error_message = "nightly_check.nodes is more than the pool's max_nodes without spot_nodes."
  }
  validation {
    condition     = var.nightly_check == null ? true : contains(["quick", "standard", "deep"], var.nightly_check.profile)
    error_message = "nightly_check.profile: quick, standard or deep."
  }
  validation {
    condition     = var.nightly_check == null ? true : can(regex("^(cron\\(([^ ]+ ){5}[^ ]+\\)|rate\\([^)]+\\))$", var.nightly_check.schedule))
    error_message = "nightly_check.schedule: cron(...) with six fields, such as cron(0 3 * * ? *), or rate(...)."
  }
  validation {
    condition     = var.nightly_check == null ? true : contains(range(1, 169), var.nightly_check.silent_hours)
    error_message = "nightly_check.silent_hours: a whole number from 1 to 168."
  }
  validation {
    condition     = var.nightly_check == null ? true : var.metadata_service_url != null
    error_message = "nightly_check runs on several nodes of Batch, which needs metadata_service_url."
  }
}

variable "alert_emails" {
  description = "Who hears of the budget and of a failed nightly check."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for address in var.alert_emails : can(regex("^[^@ ]+@[^@ ]+$", address))])
    error_message = "alert_emails: one of them is no mail address."
  }
}

variable "monthly_budget_usd" {
  description = "Of the whole account; warns at 80 % of it and when the forecast is above. Null: no alarm."
  type        = number
  default     = null
  validation {
    condition     = var.monthly_budget_usd == null ? true : var.monthly_budget_usd > 0
    error_message = "monthly_budget_usd: more than 0."
  }
  validation {
    condition     = var.monthly_budget_usd == null ? true : length(var.alert_emails) > 0
    error_message = "monthly_budget_usd needs alert_emails: somebody has to hear of it."
  }
}
