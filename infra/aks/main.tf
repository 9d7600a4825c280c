# An AKS cluster for runs on several nodes. Nothing runs except two CPU nodes; GPU nodes start from zero.

resource "azurerm_resource_group" "this" {
  name     = var.name
  location = var.location
}

# Without this feature AKS may place the nodes of a pool on different InfiniBand fabrics.
resource "azurerm_resource_provider_feature_registration" "infiniband" {
  name          = "AKSInfinibandSupport"
  provider_name = "Microsoft.ContainerService"
}

resource "azurerm_kubernetes_cluster" "this" {
  name                      = var.name
  resource_group_name       = azurerm_resource_group.this.name
  location                  = var.location
  dns_prefix                = var.name
  oidc_issuer_enabled       = true
  workload_identity_enabled = true
  default_node_pool {
    name            = "system"
    vm_size         = "Standard_D8s_v5" # controllers, and steps without GPUs
    node_count      = 2
    os_disk_size_gb = 128
    upgrade_settings {
      max_surge = "1"
    }
  }
  identity {
    type = "SystemAssigned"
  }
  network_profile {
    network_plugin      = "azure"
    network_plugin_mode = "overlay"
    network_data_plane  = "cilium"
    network_policy      = "cilium"
  }
  api_server_access_profile {
    authorized_ip_ranges = var.api_networks
  }
  depends_on = [azurerm_resource_provider_feature_registration.infiniband]
}

locals {
  pools = merge(
    { gpu = { spot = false, nodes = var.gpu_pool.max_nodes - var.gpu_pool.spot_nodes } },
    var.gpu_pool.spot_nodes == 0 ? {} : { gpuspot = { spot = true, nodes = var.gpu_pool.spot_nodes } },
  )
}

resource "azurerm_kubernetes_cluster_node_pool" "gpu" {
  for_each                      = local.pools
  name                          = each.key
  kubernetes_cluster_id         = azurerm_kubernetes_cluster.this.id
  vm_size                       = var.gpu_pool.vm_size
  auto_scaling_enabled          = true
  min_count                     = 0
  max_count                     = each.value.nodes
  gpu_driver                    = "Install"
  os_disk_type                  = "Ephemeral" # weights and checkpoints
  os_disk_size_gb               = 900
  priority                      = each.value.spot ? "Spot" : "Regular"
  eviction_policy               = each.value.spot ? "Delete" : null
  spot_max_price                = each.value.spot ? -1 : null # at most the price on demand
  capacity_reservation_group_id = each.value.spot ? null : var.gpu_pool.capacity_reservation_group_id
  node_labels                   = each.value.spot ? { "kubernetes.azure.com/scalesetpriority" = "spot" } : null
  node_taints = concat(
    ["sku=gpu:NoSchedule"], # steps without GPUs stay off
    each.value.spot ? ["kubernetes.azure.com/scalesetpriority=spot:NoSchedule"] : [],
  )
}

# -- datastore, images, identities

resource "azurerm_storage_account" "datastore" {
  name                            = "${var.name}${var.unique_suffix}"
  resource_group_name             = azurerm_resource_group.this.name
  location                        = var.location
  account_tier                    = "Standard"
  account_replication_type        = "LRS"
  shared_access_key_enabled       = false
  allow_nested_items_to_be_public = false
  min_tls_version                 = "TLS1_2"
  blob_properties {
    delete_retention_policy {
      days = 7
    }
  }
}

resource "azurerm_storage_container" "metaflow" {
  name               = "metaflow"
  storage_account_id = azurerm_storage_account.datastore.id
}

resource "azurerm_container_registry" "images" {
  name                = "${var.name}${var.unique_suffix}"
  resource_group_name = azurerm_resource_group.this.name
  location            = var.location
  sku                 = "Basic"
}

resource "azurerm_role_assignment" "pull" {
  scope                            = azurerm_container_registry.images.id
  role_definition_name             = "AcrPull"
  principal_id                     = azurerm_kubernetes_cluster.this.kubelet_identity[0].object_id
  skip_service_principal_aad_check = true
}

locals {
  accounts = { flow = "finetune", checklist = "finetune-check" } # service account -> namespace
}

resource "azurerm_user_assigned_identity" "pods" {
  for_each            = local.accounts
  name                = "${var.name}-${each.key}"
  resource_group_name = azurerm_resource_group.this.name
  location            = var.location
}

resource "azurerm_federated_identity_credential" "pods" {
  for_each            = local.accounts
  name                = each.key
  resource_group_name = azurerm_resource_group.this.name
  parent_id           = azurerm_user_assigned_identity.pods[each.key].id
  issuer              = azurerm_kubernetes_cluster.this.oidc_issuer_url
  subject             = "system:serviceaccount:${each.value}:${each.key}"
  audience            = ["api://AzureADTokenExchange"]
}

resource "azurerm_role_assignment" "datastore" {
  for_each             = local.accounts
  scope                = azurerm_storage_account.datastore.id
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = azurerm_user_assigned_identity.pods[each.key].principal_id
  principal_type       = "ServicePrincipal"
}

resource "azurerm_role_assignment" "secrets" {
  for_each             = toset(var.key_vault_secret_ids)
  scope                = each.key
  role_definition_name = "Key Vault Secrets User"
  principal_id         = azurerm_user_assigned_identity.pods["flow"].principal_id
  principal_type       = "ServicePrincipal"
}

resource "azurerm_consumption_budget_resource_group" "monthly" {
  count             = var.budget == null ? 0 : 1
  name              = "${var.name}-monthly"
  resource_group_id = azurerm_resource_group.this.id
  amount            = var.budget.monthly_usd
  time_grain        = "Monthly"
  time_period {
    start_date = "${var.budget.start}T00:00:00Z"
  }
  dynamic "notification" {
    for_each = { Actual = 80, Forecasted = 100 }
    content {
      operator       = "GreaterThan"
      threshold      = notification.value
      threshold_type = notification.key
      contact_emails = var.budget.emails
    }
  }
}
