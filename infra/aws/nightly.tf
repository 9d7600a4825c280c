# The nightly check on Batch. Step Functions cannot express a step on several nodes, so the schedule starts a small
# job that launches the flow as a person would. Its result is then in Metaflow: with its past, its card, and where
# finetune_flow.py looks before it takes GPUs. (`python -m checklist` as a multi-node job would need no Metaflow,
# and leave none of that.)

locals {
  nightly      = var.nightly_check == null ? {} : { this = var.nightly_check }
  nightly_name = "${var.name}-nightly-check"
  nightly_ends = {
    failed = { statuses = ["FAILED"], description = "The nightly check of the nodes failed: its log says why" }
    ended  = { statuses = ["SUCCEEDED", "FAILED"], description = "The nightly check of the nodes ended, well or not" }
  }
}

resource "aws_iam_role" "nightly" {
  for_each           = local.nightly
  name_prefix        = "${var.name}-nightly-"
  assume_role_policy = data.aws_iam_policy_document.assumed_by["ecs-tasks.amazonaws.com"].json
}

resource "aws_iam_role_policy_attachment" "nightly" {
  for_each = { for pair in setproduct(keys(local.nightly), ["datastore", "launcher", "definitions"]) : pair[1] => pair[0] }
  role     = aws_iam_role.nightly[each.value].name
  policy_arn = {
    datastore   = aws_iam_policy.datastore.arn
    launcher    = aws_iam_policy.launcher.arn
    definitions = aws_iam_policy.definitions.arn
  }[each.key]
}

resource "aws_batch_job_definition" "nightly" {
  for_each = local.nightly
  name     = local.nightly_name
  type     = "container"

  propagate_tags = true
  timeout {
    attempt_duration_seconds = 6 * 3600
  }
  container_properties = jsonencode({
    image = each.value.image
    command = [
      "python", "flows/checklist_flow.py", "run", "--with", "batch",
      "--queue", aws_batch_job_queue.multi[each.value.pool].name,
      "--instance-type", var.gpu_pools[each.value.pool].instance_type,
      "--nodes", tostring(each.value.nodes),
      "--profile", each.value.profile,
      "--cloudwatch", "-",
    ]
    environment = [
      for key, value in merge(local.metaflow, {
        METAFLOW_BATCH_CONTAINER_IMAGE = each.value.on_nodes
        METAFLOW_SERVICE_URL           = local.metadata_inner
        METAFLOW_USER                  = "nightly-check"
        AWS_DEFAULT_REGION             = local.region
      }) : { name = key, value = value }
    ]
    jobRoleArn           = aws_iam_role.nightly[each.key].arn
    resourceRequirements = [{ type = "VCPU", value = "1" }, { type = "MEMORY", value = "2048" }]
    logConfiguration     = { logDriver = "awslogs" }
  })
}

data "aws_iam_policy_document" "scheduler" {
  for_each = local.nightly
  statement {
    actions = ["batch:SubmitJob"]
    resources = [
      aws_batch_job_queue.cpu.arn,
      aws_batch_job_definition.nightly[each.key].arn_prefix,
      "${aws_batch_job_definition.nightly[each.key].arn_prefix}:*",
    ]
  }
}

resource "aws_iam_role" "scheduler" {
  for_each           = local.nightly
  name_prefix        = "${var.name}-scheduler-"
  assume_role_policy = data.aws_iam_policy_document.assumed_by["scheduler.amazonaws.com"].json
}

resource "aws_iam_role_policy" "scheduler" {
  for_each = local.nightly
  role     = aws_iam_role.scheduler[each.key].id
  policy   = data.aws_iam_policy_document.scheduler[each.key].json
}

resource "aws_scheduler_schedule" "nightly" {
  for_each            = local.nightly
  name                = local.nightly_name
  schedule_expression = each.value.schedule
  flexible_time_window {
    mode = "OFF"
  }
  target {
    arn      = "arn:${local.partition}:scheduler:::aws-sdk:batch:submitJob"
    role_arn = aws_iam_role.scheduler[each.key].arn
    input = jsonencode({
      JobName       = local.nightly_name
      JobQueue      = aws_batch_job_queue.cpu.arn
      JobDefinition = aws_batch_job_definition.nightly[each.key].arn_prefix # the newest revision
    })
    retry_policy {
      maximum_retry_attempts = 3
    }
  }
}

# The flow ends with an error when nodes are unfit or nothing could be measured, and so does the job.
resource "aws_sns_topic" "alerts" {
  count = length(var.alert_emails) > 0 ? 1 : 0
  name  = "${var.name}-alerts"
}

resource "aws_sns_topic_subscription" "alerts" {
  for_each  = toset(var.alert_emails)
  topic_arn = aws_sns_topic.alerts[0].arn
  protocol  = "email"
  endpoint  = each.key
}

data "aws_iam_policy_document" "alerts" {
  count = length(var.alert_emails) > 0 ? 1 : 0
  statement {
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alerts[0].arn]
    principals {
      type        = "Service"
      identifiers = ["events.amazonaws.com", "cloudwatch.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

resource "aws_sns_topic_policy" "alerts" {
  count  = length(var.alert_emails) > 0 ? 1 : 0
  arn    = aws_sns_topic.alerts[0].arn
  policy = data.aws_iam_policy_document.alerts[0].json
}

resource "aws_cloudwatch_event_rule" "nightly" {
  for_each    = length(var.alert_emails) > 0 && var.nightly_check != null ? local.nightly_ends : {}
  name        = "${local.nightly_name}-${each.key}"
  description = each.value.description
  event_pattern = jsonencode({
    source      = ["aws.batch"]
    detail-type = ["Batch Job State Change"]
    detail      = { status = each.value.statuses, jobName = [local.nightly_name] }
  })
}

resource "aws_cloudwatch_event_target" "nightly_failed" {
  for_each = { for end, rule in aws_cloudwatch_event_rule.nightly : end => rule if end == "failed" }
  rule     = each.value.name
  arn      = aws_sns_topic.alerts[0].arn
}

# A check that never ends, or never begins, is in no event: so the rule "ended" counts, for this alarm.
resource "aws_cloudwatch_metric_alarm" "nightly_missing" {
  for_each            = { for end, rule in aws_cloudwatch_event_rule.nightly : end => rule if end == "ended" }
  alarm_name          = "${local.nightly_name}-missing"
  alarm_description   = "No check of the nodes has ended for ${var.nightly_check.silent_hours} hours"
  comparison_operator = "LessThanThreshold"
  threshold           = 1
  # Hours without an event have no datapoint; FILL makes it 0, which needs no wait for missing data
  evaluation_periods = var.nightly_check.silent_hours
  treat_missing_data = "breaching"
  alarm_actions      = [aws_sns_topic.alerts[0].arn]
  metric_query {
    id          = "ends"
    expression  = "FILL(matched, 0)"
    label       = "Ends of the nightly check"
    return_data = true
  }
  metric_query {
    id = "matched"
    metric {
      namespace   = "AWS/Events"
      metric_name = "MatchedEvents"
      dimensions  = { RuleName = each.value.name }
      period      = 3600
      stat        = "Sum"
    }
  }
}
