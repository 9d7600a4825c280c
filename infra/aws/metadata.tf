# Metaflow's metadata service, which runs on several nodes need on Batch: a container on Fargate and a Postgres
# database, both in private subnets. Jobs reach it within the VPC. Launchers outside reach it through API Gateway,
# which asks for a key.

locals {
  own_metadata   = var.metadata_service == null ? {} : { this = var.metadata_service }
  metadata_name  = "${var.name}-metadata"
  metadata_port  = 8080
  postgres_port  = 5432
  metadata_inner = var.metadata_service_url != null ? var.metadata_service_url : one([for lb in aws_lb.metadata : "http://${lb.dns_name}:${local.metadata_port}"])
  metadata_outer = var.metadata_service_url != null ? var.metadata_service_url : one([for stage in aws_api_gateway_stage.metadata : stage.invoke_url])
}

# -- database

ephemeral "aws_secretsmanager_random_password" "metadata" {
  for_each            = local.own_metadata
  password_length     = 40
  exclude_punctuation = true
}

resource "aws_secretsmanager_secret" "metadata" {
  for_each    = local.own_metadata
  name_prefix = "${local.metadata_name}-db-"
}

# Write-only: the password is in no Terraform state.
resource "aws_secretsmanager_secret_version" "metadata" {
  for_each                 = local.own_metadata
  secret_id                = aws_secretsmanager_secret.metadata[each.key].id
  secret_string_wo         = ephemeral.aws_secretsmanager_random_password.metadata[each.key].random_password
  secret_string_wo_version = 1
}

ephemeral "aws_secretsmanager_secret_version" "metadata" {
  for_each  = local.own_metadata
  secret_id = aws_secretsmanager_secret_version.metadata[each.key].secret_id
}

resource "aws_db_subnet_group" "metadata" {
  for_each   = local.own_metadata
  name       = local.metadata_name
  subnet_ids = local.subnets
}

resource "aws_db_instance" "metadata" {
  for_each                  = local.own_metadata
  identifier                = local.metadata_name
  engine                    = "postgres"
  engine_version            = "16"
  instance_class            = each.value.instance_class
  allocated_storage         = each.value.storage_gib
  storage_type              = "gp3"
  storage_encrypted         = true
  db_name                   = "metaflow"
  username                  = "metaflow"
  password_wo               = ephemeral.aws_secretsmanager_secret_version.metadata[each.key].secret_string
  password_wo_version       = 1
  db_subnet_group_name      = aws_db_subnet_group.metadata[each.key].name
  vpc_security_group_ids    = [aws_security_group.metadata_db[each.key].id]
  backup_retention_period   = 7
  final_snapshot_identifier = "${local.metadata_name}-final"
}

# -- network

resource "aws_security_group" "metadata" {
  for_each    = local.own_metadata
  name_prefix = "${local.metadata_name}-"
  description = "Metadata service: from the VPC; to its database and to HTTPS"
  vpc_id      = local.vpc_id
  ingress {
    description = "Jobs, and the load balancer"
    protocol    = "tcp"
    from_port   = local.metadata_port
    to_port     = local.metadata_port
    cidr_blocks = [data.aws_vpc.this.cidr_block]
  }
  egress {
    description = "Image, logs, secret"
    protocol    = "tcp"
    from_port   = 443
    to_port     = 443
    cidr_blocks = ["0.0.0.0/0"]
  }
  egress {
    description = "Database"
    protocol    = "tcp"
    from_port   = local.postgres_port
    to_port     = local.postgres_port
    cidr_blocks = [data.aws_vpc.this.cidr_block]
  }
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_security_group" "metadata_db" {
  for_each    = local.own_metadata
  name_prefix = "${local.metadata_name}-db-"
  description = "Database of the metadata service: from the service only"
  vpc_id      = local.vpc_id
  ingress {
    description     = "Metadata service"
    protocol        = "tcp"
    from_port       = local.postgres_port
    to_port         = local.postgres_port
    security_groups = [aws_security_group.metadata[each.key].id]
  }
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_lb" "metadata" {
  for_each           = local.own_metadata
  name               = local.metadata_name
  internal           = true
  load_balancer_type = "network"
  subnets            = local.subnets
}

resource "aws_lb_target_group" "metadata" {
  for_each    = local.own_metadata
  name        = local.metadata_name
  vpc_id      = local.vpc_id
  target_type = "ip"
  protocol    = "TCP"
  port        = local.metadata_port
  health_check {
    protocol = "HTTP"
    path     = "/ping"
  }
}

resource "aws_lb_listener" "metadata" {
  for_each          = local.own_metadata
  load_balancer_arn = aws_lb.metadata[each.key].arn
  protocol          = "TCP"
  port              = local.metadata_port
  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.metadata[each.key].arn
  }
}

# -- service

data "aws_iam_policy_document" "metadata" {
  for_each = local.own_metadata
  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = [aws_secretsmanager_secret.metadata[each.key].arn]
  }
}

resource "aws_iam_role" "metadata" {
  for_each           = local.own_metadata
  name_prefix        = "${local.metadata_name}-"
  assume_role_policy = data.aws_iam_policy_document.assumed_by["ecs-tasks.amazonaws.com"].json
}

resource "aws_iam_role_policy" "metadata" {
  for_each = local.own_metadata
  role     = aws_iam_role.metadata[each.key].id
  policy   = data.aws_iam_policy_document.metadata[each.key].json
}

# AWS's own policy: pull images, write logs
resource "aws_iam_role_policy_attachment" "metadata" {
  for_each   = local.own_metadata
  role       = aws_iam_role.metadata[each.key].name
  policy_arn = "arn:${local.partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

resource "aws_cloudwatch_log_group" "metadata" {
  for_each          = local.own_metadata
  name              = "/ecs/${local.metadata_name}"
  retention_in_days = var.job_logs.retention_days
  kms_key_id        = var.job_logs.kms_key_arn
}

resource "aws_ecs_cluster" "metadata" {
  for_each = local.own_metadata
  name     = local.metadata_name
}

locals {
  metadata_container = { for key, service in local.own_metadata : key => {
    image = service.image
    environment = [
      { name = "MF_METADATA_DB_HOST", value = aws_db_instance.metadata[key].address },
      { name = "MF_METADATA_DB_PORT", value = tostring(local.postgres_port) },
      { name = "MF_METADATA_DB_USER", value = "metaflow" },
      { name = "MF_METADATA_DB_NAME", value = "metaflow" },
    ]
    secrets = [{ name = "MF_METADATA_DB_PSWD", valueFrom = aws_secretsmanager_secret.metadata[key].arn }]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.metadata[key].name
        awslogs-region        = local.region
        awslogs-stream-prefix = "metadata"
      }
    }
  } }
}

resource "aws_ecs_task_definition" "metadata" {
  for_each                 = local.own_metadata
  family                   = local.metadata_name
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = 256
  memory                   = 1024
  execution_role_arn       = aws_iam_role.metadata[each.key].arn
  container_definitions = jsonencode([
    # Creates the tables, and changes them after an update of the image
    merge(local.metadata_container[each.key], {
      name      = "migrate"
      essential = false
      command   = ["/opt/latest/bin/python3", "/root/run_goose.py"]
    }),
    merge(local.metadata_container[each.key], {
      name         = "service"
      essential    = true
      command      = ["/opt/latest/bin/python3", "-m", "services.metadata_service.server"]
      portMappings = [{ containerPort = local.metadata_port, protocol = "tcp" }]
      dependsOn    = [{ containerName = "migrate", condition = "SUCCESS" }]
    }),
  ])
  depends_on = [aws_secretsmanager_secret_version.metadata]
}

resource "aws_ecs_service" "metadata" {
  for_each        = local.own_metadata
  name            = local.metadata_name
  cluster         = aws_ecs_cluster.metadata[each.key].id
  task_definition = aws_ecs_task_definition.metadata[each.key].arn
  desired_count   = 1
  launch_type     = "FARGATE"
  network_configuration {
    subnets         = local.subnets
    security_groups = [aws_security_group.metadata[each.key].id]
  }
  load_balancer {
    target_group_arn = aws_lb_target_group.metadata[each.key].arn
    container_name   = "service"
    container_port   = local.metadata_port
  }
  depends_on = [aws_lb_listener.metadata, aws_iam_role_policy.metadata, aws_iam_role_policy_attachment.metadata]
}

# -- access from outside the VPC, with a key

resource "aws_api_gateway_vpc_link" "metadata" {
  for_each    = local.own_metadata
  name        = local.metadata_name
  target_arns = [aws_lb.metadata[each.key].arn]
}

resource "aws_api_gateway_rest_api" "metadata" {
  for_each = local.own_metadata
  name     = local.metadata_name
  endpoint_configuration {
    types = ["REGIONAL"]
  }
}

resource "aws_api_gateway_resource" "metadata" {
  for_each    = local.own_metadata
  rest_api_id = aws_api_gateway_rest_api.metadata[each.key].id
  parent_id   = aws_api_gateway_rest_api.metadata[each.key].root_resource_id
  path_part   = "{proxy+}"
}

resource "aws_api_gateway_method" "metadata" {
  for_each           = local.own_metadata
  rest_api_id        = aws_api_gateway_rest_api.metadata[each.key].id
  resource_id        = aws_api_gateway_resource.metadata[each.key].id
  http_method        = "ANY"
  authorization      = "NONE"
  api_key_required   = true
  request_parameters = { "method.request.path.proxy" = true }
}

resource "aws_api_gateway_integration" "metadata" {
  for_each                = local.own_metadata
  rest_api_id             = aws_api_gateway_rest_api.metadata[each.key].id
  resource_id             = aws_api_gateway_resource.metadata[each.key].id
  http_method             = aws_api_gateway_method.metadata[each.key].http_method
  type                    = "HTTP_PROXY"
  integration_http_method = "ANY"
  uri                     = "http://${aws_lb.metadata[each.key].dns_name}:${local.metadata_port}/{proxy}"
  connection_type         = "VPC_LINK"
  connection_id           = aws_api_gateway_vpc_link.metadata[each.key].id
  request_parameters      = { "integration.request.path.proxy" = "method.request.path.proxy" }
}

resource "aws_api_gateway_deployment" "metadata" {
  for_each    = local.own_metadata
  rest_api_id = aws_api_gateway_rest_api.metadata[each.key].id
  triggers    = { integration = sha1(jsonencode(aws_api_gateway_integration.metadata[each.key])) }
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_api_gateway_stage" "metadata" {
  for_each      = local.own_metadata
  rest_api_id   = aws_api_gateway_rest_api.metadata[each.key].id
  deployment_id = aws_api_gateway_deployment.metadata[each.key].id
  stage_name    = "api"
}

resource "aws_api_gateway_api_key" "metadata" {
  for_each = local.own_metadata
  name     = local.metadata_name
}

resource "aws_api_gateway_usage_plan" "metadata" {
  for_each = local.own_metadata
  name     = local.metadata_name
  api_stages {
    api_id = aws_api_gateway_rest_api.metadata[each.key].id
    stage  = aws_api_gateway_stage.metadata[each.key].stage_name
  }
}

resource "aws_api_gateway_usage_plan_key" "metadata" {
  for_each      = local.own_metadata
  key_id        = aws_api_gateway_api_key.metadata[each.key].id
  key_type      = "API_KEY"
  usage_plan_id = aws_api_gateway_usage_plan.metadata[each.key].id
}
