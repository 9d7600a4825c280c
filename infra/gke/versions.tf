terraform {
  required_version = ">= 1.9"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = "~> 7.0"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
  # The budget API needs a project to bill its requests to
  billing_project       = var.project
  user_project_override = true
}

locals {
  # GPU networks of a node, by machine type. Source: GKE guide "Maximize GPU network bandwidth" (TCPX: four networks on
  # a3-highgpu-8g; TCPXO: eight on a3-megagpu-8g)
  gpu_networks = lookup({ "a3-highgpu-8g" = 4, "a3-megagpu-8g" = 8 }, var.gpu_pool.machine_type, 0)
  # Local SSDs, which the machine types have built in. Source: Compute Engine, "GPU machine types"
  local_ssds = { "a2-highgpu-8g" = 8, "a2-ultragpu-8g" = 8, "a3-highgpu-8g" = 16, "a3-megagpu-8g" = 16 }
  # Names of GPUs in Compute Engine's API
  accelerators = {
    "a2-highgpu-8g"  = "nvidia-tesla-a100"
    "a2-ultragpu-8g" = "nvidia-a100-80gb"
    "a3-highgpu-8g"  = "nvidia-h100-80gb"
    "a3-megagpu-8g"  = "nvidia-h100-mega-80gb"
  }
  # The same table that plans are made from
  machines = {
    for row in csvdecode(file("${path.module}/../../estimator/data/instances.csv")) :
    row.instance_type => { gpus = tonumber(row.gpu_count), usd_per_hour = try(tonumber(row.on_demand_usd_h), null) }
    if row.cloud == "GCP"
  }
}
