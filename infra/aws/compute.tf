# For each GPU type: a queue for runs on one node or several (on-demand, one zone, a placement group, EFA), and, if
# the pool has spot machines, a queue for single-node runs that takes those first. One queue for steps without GPUs.
# Everything starts from no machine and goes back to none.

locals {
  # Metaflow's job definitions hold no ulimits, and EFA pins memory: so every container gets it unlimited.
  unlimited_memlock = <<-EOT
    #!/bin/bash
    options=/etc/sysconfig/docker
    if ! grep -qs 'memlock=-1' "$options"; then
      if grep -qs '^OPTIONS="' "$options"; then
        sed -i 's/^OPTIONS="/OPTIONS="--default-ulimit memlock=-1:-1 /' "$options"
      else
        echo 'OPTIONS="--default-ulimit memlock=-1:-1"' >>"$options"
      fi
    fi
  EOT

  # Boothooks run before Docker starts, which reads that file then.
  user_data = { for own_disks in [true, false] : own_disks => join("\n", concat(
    ["MIME-Version: 1.0", "Content-Type: multipart/mixed; boundary=\"==BOUNDARY==\"", ""],
    flatten([for script in concat([local.unlimited_memlock], own_disks ? [file("${path.module}/instance_store.sh")] : []) :
      ["--==BOUNDARY==", "Content-Type: text/cloud-boothook; charset=\"us-ascii\"", "", script]
    ]),
    ["--==BOUNDARY==--", ""],
  )) }

  # Compute environments of GPUs, which together have max_nodes machines. Both queues of a pool share POOL-multi.
  environments = merge(
    { for key, pool in var.gpu_pools : "${key}-multi" => {
      pool    = pool
      nodes   = pool.max_nodes - pool.spot_nodes
      type    = "EC2"              # Batch does not run multi-node jobs on spot machines
      subnets = [local.subnets[0]] # nodes of a run are in one zone
    } },
    { for key, pool in var.gpu_pools : "${key}-spot" => {
      pool    = pool
      nodes   = pool.spot_nodes
      type    = "SPOT"
      subnets = local.subnets
    } if pool.spot_nodes > 0 },
  )
  several_nodes = toset([for key in keys(var.gpu_pools) : "${key}-multi"])

  # default_tags reach no machine that Batch starts, so these are in the launch templates too.
  tags          = merge({ Project = var.name }, var.tags)
  tagged        = ["instance", "volume", "network-interface"]
  gp3_iops_free = 3000 # of a gp3 volume; more is needed for more than 4 MiB/s each

  # Jobs that can never start, and jobs for which there are no machines, must not keep a queue for good.
  stuck = {
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"         = 1800
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE" = 1800
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"           = var.capacity_hours * 3600
  }
}

resource "aws_placement_group" "gpu" {
  for_each = toset([for key in local.several_nodes : key if local.environments[key].pool.placement_group])
  name     = "${var.name}-${each.key}"
  strategy = "cluster"
}

resource "aws_launch_template" "gpu" {
  for_each               = local.environments
  name_prefix            = "${var.name}-${each.key}-"
  user_data              = base64encode(local.user_data[each.value.pool.instance_store])
  update_default_version = true

  dynamic "network_interfaces" {
    for_each = contains(local.several_nodes, each.key) ? local.cards[each.value.pool.instance_type] : []
    content {
      interface_type        = network_interfaces.value.type
      network_card_index    = network_interfaces.value.card
      device_index          = network_interfaces.value.device
      security_groups       = [aws_security_group.nodes.id]
      delete_on_termination = true
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.value.pool.capacity_reservation_id == null ? [] : [each.value.pool.capacity_reservation_id]
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.pool.capacity_block ? ["capacity-block"] : []
    content {
      market_type = instance_market_options.value
    }
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = each.value.pool.disk_gib
      volume_type           = "gp3"
      throughput            = each.value.pool.disk_mib_per_s
      iops                  = max(local.gp3_iops_free, each.value.pool.disk_mib_per_s * 4)
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = local.tagged
    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.name}-${each.key}", Pool = each.key })
    }
  }

  # Containers of one node's jobs, which are behind the host's bridge, don't reach it, and so not the machine's own
  # role. Those of several nodes have interfaces of their own and do: the checklist asks which machine they are on.
  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
}

resource "aws_batch_compute_environment" "gpu" {
  for_each                        = local.environments
  compute_environment_name_prefix = "${var.name}-${each.key}-"
  type                            = "MANAGED"
  service_role                    = var.batch_service_role_arn
  compute_resources {
    type                = each.value.type
    allocation_strategy = each.value.type == "SPOT" ? "SPOT_PRICE_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    instance_type       = [each.value.pool.instance_type]
    min_vcpus           = 0
    max_vcpus           = each.value.nodes * local.machines[each.value.pool.instance_type].vcpus
    subnets             = each.value.subnets
    security_group_ids  = [aws_security_group.nodes.id]
    instance_role       = aws_iam_instance_profile.nodes.arn
    placement_group     = try(aws_placement_group.gpu[each.key].name, null)
    tags                = merge(local.tags, { Name = "${var.name}-${each.key}", Pool = each.key })
    ec2_configuration {
      image_type        = var.gpu_image_type
      image_id_override = each.value.pool.image_id
    }
    launch_template {
      launch_template_id = aws_launch_template.gpu[each.key].id
      version            = aws_launch_template.gpu[each.key].latest_version
    }
  }
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy_attachment.nodes]
}

# Weights and data are fetched here, so the disk is as large as a model.
resource "aws_launch_template" "cpu" {
  name_prefix            = "${var.name}-cpu-"
  update_default_version = true

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.cpu_disk_gib
      volume_type           = "gp3"
      throughput            = var.cpu_disk_mib_per_s
      iops                  = max(local.gp3_iops_free, var.cpu_disk_mib_per_s * 4)
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = local.tagged
    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.name}-cpu", Pool = "cpu" })
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
}

resource "aws_batch_compute_environment" "cpu" {
  compute_environment_name_prefix = "${var.name}-cpu-"
  type                            = "MANAGED"
  service_role                    = var.batch_service_role_arn
  compute_resources {
    type                = "EC2"
    allocation_strategy = "BEST_FIT_PROGRESSIVE"
    instance_type       = ["optimal"]
    min_vcpus           = 0
    max_vcpus           = var.cpu_max_vcpus
    tags                = merge(local.tags, { Name = "${var.name}-cpu", Pool = "cpu" })
    subnets             = local.subnets
    security_group_ids  = [aws_security_group.nodes.id]
    instance_role       = aws_iam_instance_profile.nodes.arn
    ec2_configuration {
      image_type = "ECS_AL2023"
    }
    launch_template {
      launch_template_id = aws_launch_template.cpu.id
      version            = aws_launch_template.cpu.latest_version
    }
  }
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy_attachment.nodes]
}

resource "aws_batch_job_queue" "multi" {
  for_each = var.gpu_pools
  name     = "${var.name}-${each.key}"
  state    = "ENABLED"
  priority = 10
  dynamic "job_state_time_limit_action" {
    for_each = local.stuck
    content {
      state            = "RUNNABLE"
      reason           = job_state_time_limit_action.key
      max_time_seconds = job_state_time_limit_action.value
      action           = "CANCEL"
    }
  }
  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.gpu["${each.key}-multi"].arn
  }
}

resource "aws_batch_job_queue" "single" {
  for_each = { for key, pool in var.gpu_pools : key => pool if pool.spot_nodes > 0 }
  name     = "${var.name}-${each.key}-single"
  state    = "ENABLED"
  priority = 10
  dynamic "job_state_time_limit_action" {
    for_each = local.stuck
    content {
      state            = "RUNNABLE"
      reason           = job_state_time_limit_action.key
      max_time_seconds = job_state_time_limit_action.value
      action           = "CANCEL"
    }
  }
  dynamic "compute_environment_order" {
    for_each = ["spot", "multi"]
    content {
      order               = compute_environment_order.key + 1
      compute_environment = aws_batch_compute_environment.gpu["${each.key}-${compute_environment_order.value}"].arn
    }
  }
}

resource "aws_batch_job_queue" "cpu" {
  name     = "${var.name}-cpu"
  state    = "ENABLED"
  priority = 10
  dynamic "job_state_time_limit_action" {
    for_each = local.stuck
    content {
      state            = "RUNNABLE"
      reason           = job_state_time_limit_action.key
      max_time_seconds = job_state_time_limit_action.value
      action           = "CANCEL"
    }
  }
  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.cpu.arn
  }
}
