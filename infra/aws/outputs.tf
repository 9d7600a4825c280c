locals {
  # Metaflow's configuration, as its variables
  metaflow = merge(
    {
      METAFLOW_DEFAULT_DATASTORE        = "s3"
      METAFLOW_DATASTORE_SYSROOT_S3     = "s3://${aws_s3_bucket.datastore.id}/metaflow"
      METAFLOW_DATATOOLS_S3ROOT         = "s3://${aws_s3_bucket.datastore.id}/data"
      METAFLOW_BATCH_JOB_QUEUE          = aws_batch_job_queue.cpu.name
      METAFLOW_ECS_S3_ACCESS_IAM_ROLE   = aws_iam_role.job.arn
      METAFLOW_BATCH_CONTAINER_REGISTRY = "${local.account}.dkr.ecr.${local.region}.amazonaws.com"
      METAFLOW_BATCH_EMIT_TAGS          = "true"
      METAFLOW_BATCH_DEFAULT_TAGS       = jsonencode({ Project = var.name })
      FINETUNE_QUEUES                   = local.queues
    },
    var.metadata_service_url == null ? {} : {
      METAFLOW_DEFAULT_METADATA     = "service"
      METAFLOW_SERVICE_URL          = var.metadata_service_url
      METAFLOW_SERVICE_INTERNAL_URL = var.metadata_service_url
    },
    length(var.secret_arns) == 0 ? {} : {
      METAFLOW_AWS_SECRETS_MANAGER_DEFAULT_REGION = split(":", var.secret_arns[0])[3]
    },
  )

  # By the GPU's name in estimator/data/gpus.csv; of two pools of one GPU the first by name
  gpus   = { for key, pool in var.gpu_pools : local.machines[pool.instance_type].gpu => key... }
  queues = join(",", [for gpu, keys in local.gpus : "${gpu}=${aws_batch_job_queue.multi[sort(keys)[0]].name}"])

  prices = [for environment in values(local.environments) : local.machines[environment.pool.instance_type].usd_per_hour]
}

output "metaflow_environment" {
  description = "Lines for a shell: terraform output -raw metaflow_environment"
  value       = join("", [for key, value in local.metaflow : "export ${key}='${value}'\n"])
}

output "metaflow_config" {
  description = "For ~/.metaflowconfig/config.json: terraform output -raw metaflow_config. FINETUNE_QUEUES is a variable of the shell besides."
  value       = jsonencode({ for key, value in local.metaflow : key => value if startswith(key, "METAFLOW_") })
}

output "queues" {
  description = "Of each pool: for runs on one node or several, and for runs on one node only."
  value = {
    for key in keys(var.gpu_pools) : key => {
      any_nodes = aws_batch_job_queue.multi[key].name
      one_node  = try(aws_batch_job_queue.single[key].name, null)
    }
  }
}

output "repositories" {
  description = "For the images of infra/docker."
  value       = { for key, repository in aws_ecr_repository.images : key => repository.repository_url }
}

output "launcher_policies" {
  description = "For people who launch runs. Without launchers_register_definitions they run registered definitions only."
  value = concat(
    [aws_iam_policy.launcher.arn, aws_iam_policy.datastore.arn],
    var.launchers_register_definitions ? [aws_iam_policy.definitions.arn] : [],
  )
}

output "definitions_policy" {
  description = "For the people who, in addition to launcher_policies, may register job definitions."
  value       = aws_iam_policy.definitions.arn
}

output "secrets_policy" {
  description = "For the pods of a Kubernetes cluster that read secret_arns. Null: there are none."
  value       = one(aws_iam_policy.secrets[*].arn)
}

output "datastore_policy" {
  description = "For the pods of a Kubernetes cluster that uses the same datastore."
  value       = aws_iam_policy.datastore.arn
}

output "most_usd_per_hour" {
  description = "All GPU machines that the compute environments allow together, spot ones too, at the table's on-demand prices (us-east-1, estimator/data/instances.csv). Null: one of them is unknown."
  value = anytrue([for price in local.prices : price == null]) ? null : sum(concat([0], [
    for environment in values(local.environments) :
    environment.nodes * local.machines[environment.pool.instance_type].usd_per_hour
  ]))
}
