output "metaflow_environment" {
  description = "Lines for a shell: terraform output -raw metaflow_environment"
  value = join("", [for key, value in {
    METAFLOW_DEFAULT_DATASTORE                   = "azure"
    METAFLOW_DATASTORE_SYSROOT_AZURE             = "${azurerm_storage_container.metaflow.name}/flows"
    METAFLOW_AZURE_STORAGE_BLOB_SERVICE_ENDPOINT = trimsuffix(azurerm_storage_account.datastore.primary_blob_endpoint, "/")
    METAFLOW_KUBERNETES_NAMESPACE                = "finetune"
    METAFLOW_KUBERNETES_SERVICE_ACCOUNT          = "flow"
    METAFLOW_KUBERNETES_LABELS                   = "azure.workload.identity/use=true"
  } : "export ${key}='${value}'\n"])
}

output "registry" {
  description = "For the images of infra/docker."
  value       = azurerm_container_registry.images.login_server
}

output "datastore_id" {
  description = "People who launch runs need the role Storage Blob Data Contributor on it."
  value       = azurerm_storage_account.datastore.id
}

output "annotate_commands" {
  description = "Give the service accounts their identities: terraform output -raw annotate_commands | sh"
  value = join("", [for account, namespace in local.accounts :
    "kubectl annotate serviceaccount ${account} -n ${namespace} azure.workload.identity/client-id=${azurerm_user_assigned_identity.pods[account].client_id}\n"
  ])
}

output "most_usd_per_hour" {
  description = "All GPU nodes, spot ones too, at the table's on-demand prices (estimator/data/instances.csv). Null: unknown."
  value       = try(var.gpu_pool.max_nodes * local.machines[var.gpu_pool.vm_size].usd_per_hour, null)
}
