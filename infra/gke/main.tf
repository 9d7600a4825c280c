# A GKE cluster for runs on several nodes. Nothing runs except two CPU nodes; GPU nodes start from zero.

data "google_project" "this" {}

resource "google_project_service" "apis" {
  for_each = toset([
    "compute.googleapis.com", "container.googleapis.com", "storage.googleapis.com", "artifactregistry.googleapis.com",
    "secretmanager.googleapis.com", "billingbudgets.googleapis.com",
  ])
  service            = each.key
  disable_on_destroy = false
}

# -- networks: one for the cluster, and one per GPU network card

resource "google_compute_network" "main" {
  name                    = var.name
  auto_create_subnetworks = false
  depends_on              = [google_project_service.apis]
}

resource "google_compute_subnetwork" "main" {
  name                     = var.name
  network                  = google_compute_network.main.id
  region                   = var.region
  ip_cidr_range            = "10.72.0.0/20"
  private_ip_google_access = true
  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.76.0.0/14"
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.80.0.0/20"
  }
}

# Nodes have no public addresses; the model hub is reached through NAT.
resource "google_compute_router" "main" {
  name    = var.name
  network = google_compute_network.main.id
  region  = var.region
}

resource "google_compute_router_nat" "main" {
  name                               = var.name
  router                             = google_compute_router.main.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

resource "google_compute_network" "gpu" {
  count                   = local.gpu_networks
  name                    = "${var.name}-gpu-${count.index}"
  auto_create_subnetworks = false
  mtu                     = 8244 # for GPUDirect-TCPX and -TCPXO (GKE guide)
  depends_on              = [google_project_service.apis]
}

resource "google_compute_subnetwork" "gpu" {
  count         = local.gpu_networks
  name          = "${var.name}-gpu-${count.index}"
  network       = google_compute_network.gpu[count.index].id
  region        = var.region
  ip_cidr_range = "192.168.${count.index}.0/24"
}

resource "google_compute_firewall" "gpu" {
  count         = local.gpu_networks
  name          = "${var.name}-gpu-${count.index}"
  description   = "Collectives between the GPU nodes"
  network       = google_compute_network.gpu[count.index].id
  source_ranges = [google_compute_subnetwork.gpu[count.index].ip_cidr_range]
  allow {
    protocol = "tcp"
  }
  allow {
    protocol = "udp"
  }
  allow {
    protocol = "icmp"
  }
}

# -- cluster

resource "google_service_account" "nodes" {
  account_id   = "${var.name}-nodes"
  display_name = "Nodes of the cluster ${var.name}"
}

# Log, report metrics, pull images: GKE's minimal role
resource "google_project_iam_member" "nodes" {
  for_each = toset(["roles/container.defaultNodeServiceAccount", "roles/artifactregistry.reader"])
  project  = var.project
  role     = each.key
  member   = google_service_account.nodes.member
}

resource "google_container_cluster" "this" {
  name                     = var.name
  location                 = var.zone
  network                  = google_compute_network.main.id
  subnetwork               = google_compute_subnetwork.main.id
  networking_mode          = "VPC_NATIVE"
  datapath_provider        = "ADVANCED_DATAPATH" # required by several networks; enforces network policies
  enable_multi_networking  = local.gpu_networks > 0
  remove_default_node_pool = true
  initial_node_count       = 1
  deletion_protection      = false
  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }
  private_cluster_config {
    enable_private_nodes = true
  }
  master_authorized_networks_config {
    dynamic "cidr_blocks" {
      for_each = var.api_networks
      content {
        cidr_block = cidr_blocks.value
      }
    }
  }
  workload_identity_config {
    workload_pool = "${var.project}.svc.id.goog"
  }
  release_channel {
    channel = "REGULAR"
  }
}

resource "google_container_node_pool" "system" {
  name       = "system"
  cluster    = google_container_cluster.this.id
  node_count = 2
  node_config {
    machine_type    = "e2-standard-8" # controllers, and steps without GPUs
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }
}

locals {
  pools = merge(
    { gpu = { spot = false, nodes = var.gpu_pool.max_nodes - var.gpu_pool.spot_nodes, networks = local.gpu_networks } },
    var.gpu_pool.spot_nodes == 0 ? {} : { gpu-spot = { spot = true, nodes = var.gpu_pool.spot_nodes, networks = 0 } },
  )
}

resource "google_container_node_pool" "gpu" {
  for_each           = local.pools
  name               = each.key
  cluster            = google_container_cluster.this.id
  initial_node_count = 0
  autoscaling {
    min_node_count = 0
    max_node_count = each.value.nodes
  }
  management {
    auto_upgrade = false # an upgrade would end runs
    auto_repair  = true
  }
  dynamic "placement_policy" {
    for_each = each.value.spot || var.gpu_pool.reservation != null ? [] : ["COMPACT"]
    content {
      type = placement_policy.value
    }
  }
  dynamic "network_config" {
    for_each = each.value.networks > 0 ? [each.value.networks] : []
    content {
      enable_private_nodes = true
      dynamic "additional_node_network_configs" {
        for_each = range(network_config.value)
        content {
          network    = google_compute_network.gpu[additional_node_network_configs.value].name
          subnetwork = google_compute_subnetwork.gpu[additional_node_network_configs.value].name
        }
      }
    }
  }
  node_config {
    machine_type    = var.gpu_pool.machine_type
    spot            = each.value.spot
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    guest_accelerator {
      type  = local.accelerators[var.gpu_pool.machine_type]
      count = local.machines[var.gpu_pool.machine_type].gpus
      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }
    gvnic {
      enabled = true
    }
    ephemeral_storage_local_ssd_config { # weights and checkpoints
      local_ssd_count = local.local_ssds[var.gpu_pool.machine_type]
    }
    dynamic "reservation_affinity" {
      for_each = var.gpu_pool.reservation == null || each.value.spot ? [] : [var.gpu_pool.reservation]
      content {
        consume_reservation_type = "SPECIFIC_RESERVATION"
        key                      = "compute.googleapis.com/reservation-name"
        values                   = [reservation_affinity.value]
      }
    }
    dynamic "taint" { # steps without GPUs stay off; the GPU taint is GKE's own
      for_each = each.value.spot ? [1] : []
      content {
        key    = "cloud.google.com/gke-spot"
        value  = "true"
        effect = "NO_SCHEDULE"
      }
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }
  lifecycle {
    ignore_changes = [initial_node_count]
  }
}

# -- datastore, images, identities

resource "google_storage_bucket" "datastore" {
  name                        = "${var.project}-${var.name}-datastore"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  soft_delete_policy {
    retention_duration_seconds = 7 * 86400
  }
}

resource "google_artifact_registry_repository" "images" {
  repository_id = var.name
  location      = var.region
  format        = "DOCKER"
  docker_config {
    immutable_tags = true
  }
  depends_on = [google_project_service.apis]
}

locals {
  principal = "principal://iam.googleapis.com/projects/${data.google_project.this.number}/locations/global/workloadIdentityPools/${var.project}.svc.id.goog/subject/ns"
  accounts  = { flow = "${local.principal}/finetune/sa/flow", checklist = "${local.principal}/finetune-check/sa/checklist" }
}

resource "google_storage_bucket_iam_member" "datastore" {
  for_each   = local.accounts
  bucket     = google_storage_bucket.datastore.name
  role       = "roles/storage.objectUser"
  member     = each.value
  depends_on = [google_container_cluster.this] # which makes the identity pool
}

resource "google_secret_manager_secret_iam_member" "flow" {
  for_each   = toset(var.secret_ids)
  secret_id  = each.key
  role       = "roles/secretmanager.secretAccessor"
  member     = local.accounts.flow
  depends_on = [google_container_cluster.this]
}

resource "google_billing_budget" "monthly" {
  count           = var.budget == null ? 0 : 1
  billing_account = var.budget.billing_account
  display_name    = "${var.name}-monthly"
  budget_filter {
    projects = ["projects/${data.google_project.this.number}"]
  }
  amount {
    specified_amount {
      currency_code = "USD"
      units         = tostring(floor(var.budget.monthly_usd))
    }
  }
  threshold_rules {
    threshold_percent = 0.8
  }
  threshold_rules {
    threshold_percent = 1.0
    spend_basis       = "FORECASTED_SPEND"
  }
}
