terraform {
  required_version = ">= 1.9"
  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = "~> 4.67" # the first with azurerm_resource_provider_feature_registration
    }
  }
}

provider "azurerm" {
  features {}
  subscription_id     = var.subscription_id
  storage_use_azuread = true
}

locals {
  # The same table that plans are made from
  machines = {
    for row in csvdecode(file("${path.module}/../../estimator/data/instances.csv")) :
    row.instance_type => { vcpus = tonumber(row.vcpu), usd_per_hour = try(tonumber(row.on_demand_usd_h), null) }
    if row.cloud == "Azure"
  }
}
