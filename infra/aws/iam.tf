# Who may what: the nodes pull images, the jobs use the datastore, launchers start and end jobs, and nobody more.

data "aws_iam_policy_document" "assumed_by" {
  for_each = toset(["ec2.amazonaws.com", "ecs-tasks.amazonaws.com", "scheduler.amazonaws.com"])
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = [each.key]
    }
    dynamic "condition" {
      for_each = each.key == "ec2.amazonaws.com" ? [] : [local.account] # no other account's schedule or task
      content {
        test     = "StringEquals"
        variable = "aws:SourceAccount"
        values   = [condition.value]
      }
    }
  }
}

resource "aws_iam_role" "nodes" {
  name_prefix        = "${var.name}-nodes-"
  assume_role_policy = data.aws_iam_policy_document.assumed_by["ec2.amazonaws.com"].json
}

# AWS's own policy for ECS nodes: join the cluster, pull images, write logs
resource "aws_iam_role_policy_attachment" "nodes" {
  role       = aws_iam_role.nodes.name
  policy_arn = "arn:${local.partition}:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "nodes" {
  name_prefix = "${var.name}-nodes-"
  role        = aws_iam_role.nodes.name
}

data "aws_iam_policy_document" "datastore" {
  statement {
    actions   = ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.datastore.arn]
  }
  statement {
    # Delete: a checkpoint that a later one replaces
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = ["${aws_s3_bucket.datastore.arn}/*"]
  }
  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [var.kms_key_arn]
    content {
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

resource "aws_iam_policy" "datastore" {
  name   = "${var.name}-datastore"
  policy = data.aws_iam_policy_document.datastore.json
}

# METAFLOW_ECS_S3_ACCESS_IAM_ROLE: what a job's container is
resource "aws_iam_role" "job" {
  name_prefix        = "${var.name}-job-"
  assume_role_policy = data.aws_iam_policy_document.assumed_by["ecs-tasks.amazonaws.com"].json
}

resource "aws_iam_role_policy_attachment" "job" {
  role       = aws_iam_role.job.name
  policy_arn = aws_iam_policy.datastore.arn
}

data "aws_iam_policy_document" "secrets" {
  count = length(var.secret_arns) > 0 ? 1 : 0
  statement {
    actions   = ["secretsmanager:GetSecretValue"]
    resources = var.secret_arns
  }
}

# For jobs on Batch, and for the account `flow` of an EKS cluster (output secrets_policy)
resource "aws_iam_policy" "secrets" {
  count  = length(var.secret_arns) > 0 ? 1 : 0
  name   = "${var.name}-secrets"
  policy = data.aws_iam_policy_document.secrets[0].json
}

resource "aws_iam_role_policy_attachment" "job_secrets" {
  count      = length(var.secret_arns) > 0 ? 1 : 0
  role       = aws_iam_role.job.name
  policy_arn = aws_iam_policy.secrets[0].arn
}

data "aws_iam_policy_document" "launcher" {
  statement {
    # To queues of this stack only, and only with Metaflow's job definitions
    actions = ["batch:SubmitJob"]
    resources = [
      "arn:${local.partition}:batch:${local.region}:${local.account}:job-queue/${var.name}-*",
      "arn:${local.partition}:batch:${local.region}:${local.account}:job-definition/metaflow_*",
    ]
  }
  statement {
    # Metaflow's configuration (outputs.tf) gives jobs this tag, so those of other stacks are safe.
    actions   = ["batch:TagResource"]
    resources = ["arn:${local.partition}:batch:${local.region}:${local.account}:job/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/Project"
      values   = [var.name]
    }
  }
  statement {
    actions   = ["batch:TerminateJob"]
    resources = ["arn:${local.partition}:batch:${local.region}:${local.account}:job/*"]
    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/Project"
      values   = [var.name]
    }
  }
  statement {
    # Batch and EC2 know no narrower resource for these; nothing is changed by them.
    actions = [
      "batch:DescribeComputeEnvironments",
      "batch:DescribeJobDefinitions",
      "batch:DescribeJobQueues",
      "batch:DescribeJobs",
      "batch:ListJobs",
      "ec2:DescribeInstanceTypeOfferings",
      "servicequotas:GetServiceQuota",
    ]
    resources = ["*"]
  }
  statement {
    actions   = ["logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents"]
    resources = ["${local.job_logs_arn}:*"]
  }
  statement {
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.job.arn]
    condition {
      test     = "StringEquals"
      variable = "iam:PassedToService"
      values   = ["ecs-tasks.amazonaws.com"]
    }
  }
}

# For people and for the nightly check; they need finetune-datastore too.
resource "aws_iam_policy" "launcher" {
  name   = "${var.name}-launcher"
  policy = data.aws_iam_policy_document.launcher.json
}

data "aws_iam_policy_document" "definitions" {
  statement {
    # A privileged container is root on its machine, and has the machine's role. No condition key of Batch covers
    # mounted host paths, so whoever has this policy can be root on the machines (SECURITY.md).
    actions   = ["batch:RegisterJobDefinition"]
    resources = ["arn:${local.partition}:batch:${local.region}:${local.account}:job-definition/metaflow_*"]
    condition {
      test     = "BoolIfExists"
      variable = "batch:Privileged"
      values   = ["false"]
    }
  }
}

# Metaflow derives a definition's name from its content and registers it only if it does not exist, so launchers
# can run without this policy what someone with it has run before.
resource "aws_iam_policy" "definitions" {
  name   = "${var.name}-definitions"
  policy = data.aws_iam_policy_document.definitions.json
}
