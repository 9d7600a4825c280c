terraform {
  required_version = ">= 1.9" # conditions of variables that look at other values
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

# Region and credentials come from the environment, as for the aws command.
provider "aws" {
  default_tags {
    tags = local.tags
  }
}

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.name

  # Machines whose network card 0 has no EFA: it takes the plain interface, and the EFA cards follow it. Source: EC2
  # User Guide, "Maximize network bandwidth on Amazon EC2 instances with multiple network cards", and
  # github.com/aws/aws-parallelcluster/issues/7143 (2025-12)
  card_0_without_efa = ["p6-b300.48xlarge"]

  # Network interfaces by number of EFA interfaces. All but the primary one are efa-only: they have no IP address, of
  # which a p5.48xlarge would otherwise take 32 from its subnet.
  cards = { for type, machine in local.machines : type => machine.efa_interfaces == 0 ? [] : (
    contains(local.card_0_without_efa, type)
    ? [for card in range(machine.efa_interfaces + 1) : { card = card, device = 0, type = card == 0 ? "interface" : "efa-only" }]
    : [for card in range(machine.efa_interfaces) : { card = card, device = card == 0 ? 0 : 1, type = card == 0 ? "efa" : "efa-only" }]
  ) }

  # AWS machines of the same table that plans are made from: vCPUs, EFA interfaces, price
  machines = {
    for row in csvdecode(file("${path.module}/../../estimator/data/instances.csv")) :
    row.instance_type => {
      gpu            = row.gpu
      vcpus          = tonumber(row.vcpu)
      efa_interfaces = can(regex("EFA x[0-9]+", row.fabric)) ? tonumber(regex("EFA x([0-9]+)", row.fabric)[0]) : 0
      usd_per_hour   = try(tonumber(row.on_demand_usd_h), null)
    } if row.cloud == "AWS"
  }
}
