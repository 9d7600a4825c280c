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
