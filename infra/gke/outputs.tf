output "metaflow_environment" {
  description = "Lines for a shell: terraform output -raw metaflow_environment"
  value = join("", [for key, value in {
    METAFLOW_DEFAULT_DATASTORE          = "gs"
    METAFLOW_DATASTORE_SYSROOT_GS       = "gs://${google_storage_bucket.datastore.name}/metaflow"
    METAFLOW_KUBERNETES_NAMESPACE       = "finetune"
    METAFLOW_KUBERNETES_SERVICE_ACCOUNT = "flow"
  } : "export ${key}='${value}'\n"])
}

output "registry" {
  description = "For the images of infra/docker."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}"
}

output "credentials_command" {
  description = "Makes the cluster the current context of kubectl."
  value       = "gcloud container clusters get-credentials ${var.name} --location ${var.zone} --project ${var.project}"
}

output "gpu_networks" {
  description = "GPU networks as objects of the cluster: terraform output -raw gpu_networks | kubectl apply -f -"
  value = join("---\n", flatten([for index in range(local.gpu_networks) : [
    yamlencode({
      apiVersion = "networking.gke.io/v1"
      kind       = "Network"
      metadata   = { name = "vpc${index + 1}" }
      spec = {
        type          = "Device"
        parametersRef = { group = "networking.gke.io", kind = "GKENetworkParamSet", name = "vpc${index + 1}" }
      }
    }),
    yamlencode({
      apiVersion = "networking.gke.io/v1"
      kind       = "GKENetworkParamSet"
      metadata   = { name = "vpc${index + 1}" }
      spec = {
        vpc        = google_compute_network.gpu[index].name
        vpcSubnet  = google_compute_subnetwork.gpu[index].name
        deviceMode = "NetDevice"
      }
    }),
  ]]))
}

output "most_usd_per_hour" {
  description = "All GPU nodes, spot ones too, at the table's on-demand prices (estimator/data/instances.csv). Null: unknown."
  value       = try(var.gpu_pool.max_nodes * local.machines[var.gpu_pool.machine_type].usd_per_hour, null)
}
