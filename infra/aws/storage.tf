# The datastore: code, artifacts, logs, cards, checkpoints, models. Nothing in it expires by itself, as Metaflow
# stores equal content once for all runs.

locals {
  bucket = coalesce(var.bucket_name, "${var.name}-datastore-${local.account}-${local.region}")
}

resource "aws_s3_bucket" "datastore" {
  bucket = local.bucket
}

resource "aws_s3_bucket_public_access_block" "datastore" {
  bucket                  = aws_s3_bucket.datastore.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "datastore" {
  bucket = aws_s3_bucket.datastore.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "datastore" {
  bucket = aws_s3_bucket.datastore.id
  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
    bucket_key_enabled = var.kms_key_arn != null
  }
}

# Jobs may delete, as a later checkpoint replaces an earlier one: what was deleted by mistake can be had back.
resource "aws_s3_bucket_versioning" "datastore" {
  bucket = aws_s3_bucket.datastore.id
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "datastore" {
  bucket     = aws_s3_bucket.datastore.id
  depends_on = [aws_s3_bucket_versioning.datastore]
  rule {
    id     = "deleted"
    status = "Enabled"
    filter {}
    noncurrent_version_expiration {
      noncurrent_days = var.deleted_kept_days
    }
    expiration {
      expired_object_delete_marker = true
    }
  }
  rule {
    id     = "abandoned-uploads"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload {
      days_after_initiation = 3
    }
  }
  # What isn't read for a month costs less, and stays readable at once.
  rule {
    id     = "seldom-read"
    status = "Enabled"
    filter {}
    transition {
      days          = 30
      storage_class = "INTELLIGENT_TIERING"
    }
  }
}

data "aws_iam_policy_document" "tls_only" {
  statement {
    sid       = "TlsOnly"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.datastore.arn, "${aws_s3_bucket.datastore.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "datastore" {
  bucket     = aws_s3_bucket.datastore.id
  policy     = data.aws_iam_policy_document.tls_only.json
  depends_on = [aws_s3_bucket_public_access_block.datastore]
}

# Logs of jobs: Batch writes to this group unless a job definition names another, which Metaflow's do not.
locals {
  job_logs_name = "/aws/batch/job"
  job_logs_arn  = "arn:${local.partition}:logs:${local.region}:${local.account}:log-group:${local.job_logs_name}"
}

resource "aws_cloudwatch_log_group" "jobs" {
  count             = var.job_logs.create ? 1 : 0
  name              = local.job_logs_name
  retention_in_days = var.job_logs.retention_days
  kms_key_id        = var.job_logs.kms_key_arn
}

# Images of infra/docker. A tag is never moved, so a run can be repeated with the image that it had.
resource "aws_ecr_repository" "images" {
  for_each             = toset(["train", "launcher"])
  name                 = "${var.name}-${each.key}"
  image_tag_mutability = "IMMUTABLE"
  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_ecr_lifecycle_policy" "images" {
  for_each   = aws_ecr_repository.images
  repository = each.value.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "The last 30"
      selection    = { tagStatus = "any", countType = "imageCountMoreThan", countNumber = 30 }
      action       = { type = "expire" }
    }]
  })
}
