# For each GPU type: a queue for runs on one node or several (on-demand, one zone, a placement group, EFA), and a
# queue for single-node runs only (spot first where the pool has it, every zone). One for steps without GPUs.
# Everything starts from no machine and goes back to none.

locals {
  # Metaflow's job definitions hold no ulimits, and EFA pins memory: so every container gets it unlimited. Docker
  # reads the file when it starts, which a boothook comes before.
  unlimited_memlock = <<-EOT
    MIME-Version: 1.0
    Content-Type: multipart/mixed; boundary="==BOUNDARY=="

    --==BOUNDARY==
    Content-Type: text/cloud-boothook; charset="us-ascii"

    #!/bin/bash
    options=/etc/sysconfig/docker
    if ! grep -qs 'memlock=-1' "$options"; then
      if grep -qs '^OPTIONS="' "$options"; then
        sed -i 's/^OPTIONS="/OPTIONS="--default-ulimit memlock=-1:-1 /' "$options"
      else
        echo 'OPTIONS="--default-ulimit memlock=-1:-1"' >>"$options"
      fi
    fi

    --==BOUNDARY==--
  EOT

  # Compute environments by name
  multi  = { for key, pool in var.gpu_pools : key => pool }
  single = { for key, pool in var.gpu_pools : key => pool if pool.capacity_reservation_id == null }
  spot   = { for key, pool in var.gpu_pools : key => pool if pool.spot }
}

resource "aws_placement_group" "multi" {
  for_each = var.placement_groups ? local.multi : {}
  name     = "${var.name}-${each.key}"
  strategy = "cluster"
}

resource "aws_launch_template" "multi" {
  for_each               = local.multi
  name_prefix            = "${var.name}-${each.key}-multi-"
  user_data              = base64encode(local.unlimited_memlock)
  update_default_version = true

  # One EFA interface for each network card
  dynamic "network_interfaces" {
    for_each = range(local.machines[each.value.instance_type].efa_interfaces)
    content {
      interface_type        = "efa"
      network_card_index    = network_interfaces.value
      device_index          = network_interfaces.value == 0 ? 0 : 1
      security_groups       = [aws_security_group.nodes.id]
      delete_on_termination = true
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.value.capacity_reservation_id == null ? [] : [each.value.capacity_reservation_id]
    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.capacity_block ? ["capacity-block"] : []
    content {
      market_type = instance_market_options.value
    }
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = each.value.disk_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2 # containers ask for the zone, too
  }
}

resource "aws_launch_template" "single" {
  for_each               = local.single
  name_prefix            = "${var.name}-${each.key}-single-"
  user_data              = base64encode(local.unlimited_memlock)
  update_default_version = true

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = each.value.disk_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }
}

resource "aws_batch_compute_environment" "multi" {
  for_each                        = local.multi
  compute_environment_name_prefix = "${var.name}-${each.key}-multi-"
  type                            = "MANAGED"
  service_role                    = var.batch_service_role_arn
  compute_resources {
    type                = "EC2" # no spot: Batch starts runs on several nodes on none
    allocation_strategy = "BEST_FIT_PROGRESSIVE"
    instance_type       = [each.value.instance_type]
    min_vcpus           = 0
    max_vcpus           = each.value.max_nodes * local.machines[each.value.instance_type].vcpus
    subnets             = [local.subnets[0]] # nodes of a run are in one zone
    security_group_ids  = [aws_security_group.nodes.id]
    instance_role       = aws_iam_instance_profile.nodes.arn
    placement_group     = var.placement_groups ? aws_placement_group.multi[each.key].name : null
    ec2_configuration {
      image_type = var.gpu_image_type
    }
    launch_template {
      launch_template_id = aws_launch_template.multi[each.key].id
      version            = aws_launch_template.multi[each.key].latest_version
    }
  }
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy_attachment.nodes]
}

resource "aws_batch_compute_environment" "single" {
  for_each                        = local.single
  compute_environment_name_prefix = "${var.name}-${each.key}-single-"
  type                            = "MANAGED"
  service_role                    = var.batch_service_role_arn
  compute_resources {
    type                = "EC2"
    allocation_strategy = "BEST_FIT_PROGRESSIVE"
    instance_type       = [each.value.instance_type]
    min_vcpus           = 0
    max_vcpus           = each.value.max_nodes * local.machines[each.value.instance_type].vcpus
    subnets             = local.subnets
    security_group_ids  = [aws_security_group.nodes.id]
    instance_role       = aws_iam_instance_profile.nodes.arn
    ec2_configuration {
      image_type = var.gpu_image_type
    }
    launch_template {
      launch_template_id = aws_launch_template.single[each.key].id
      version            = aws_launch_template.single[each.key].latest_version
    }
  }
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy_attachment.nodes]
}

resource "aws_batch_compute_environment" "spot" {
  for_each                        = local.spot
  compute_environment_name_prefix = "${var.name}-${each.key}-spot-"
  type                            = "MANAGED"
  service_role                    = var.batch_service_role_arn
  compute_resources {
    type                = "SPOT"
    allocation_strategy = "SPOT_PRICE_CAPACITY_OPTIMIZED"
    instance_type       = [each.value.instance_type]
    min_vcpus           = 0
    max_vcpus           = each.value.max_nodes * local.machines[each.value.instance_type].vcpus
    subnets             = local.subnets
    security_group_ids  = [aws_security_group.nodes.id]
    instance_role       = aws_iam_instance_profile.nodes.arn
    ec2_configuration {
      image_type = var.gpu_image_type
    }
    launch_template {
      launch_template_id = aws_launch_template.single[each.key].id
      version            = aws_launch_template.single[each.key].latest_version
    }
  }
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy_attachment.nodes]
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
    subnets             = local.subnets
    security_group_ids  = [aws_security_group.nodes.id]
    instance_role       = aws_iam_instance_profile.nodes.arn
    ec2_configuration {
      image_type = "ECS_AL2023"
    }
  }
  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_iam_role_policy_attachment.nodes]
}

resource "aws_batch_job_queue" "multi" {
  for_each = local.multi
  name     = "${var.name}-${each.key}"
  state    = "ENABLED"
  priority = 10
  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.multi[each.key].arn
  }
}

resource "aws_batch_job_queue" "single" {
  for_each = local.single
  name     = "${var.name}-${each.key}-single"
  state    = "ENABLED"
  priority = 10
  dynamic "compute_environment_order" {
    for_each = concat(
      each.value.spot ? [aws_batch_compute_environment.spot[each.key].arn] : [],
      [aws_batch_compute_environment.single[each.key].arn],
    )
    content {
      order               = compute_environment_order.key + 1
      compute_environment = compute_environment_order.value
    }
  }
}

resource "aws_batch_job_queue" "cpu" {
  name     = "${var.name}-cpu"
  state    = "ENABLED"
  priority = 10
  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.cpu.arn
  }
}
