# A VPC of its own, unless network names one. Nodes are in private subnets: those with several EFA interfaces cannot
# have public addresses.

data "aws_availability_zones" "available" {
  state = "available"
}

locals {
  makes_vpc = var.network.vpc_id == null
  zones     = length(var.network.zones) > 0 ? var.network.zones : slice(sort(data.aws_availability_zones.available.names), 0, 2)
  vpc_id    = local.makes_vpc ? aws_vpc.this[0].id : var.network.vpc_id
  subnets   = local.makes_vpc ? [for zone in local.zones : aws_subnet.private[zone].id] : var.network.subnet_ids
}

resource "aws_vpc" "this" {
  count                = local.makes_vpc ? 1 : 0
  cidr_block           = var.network.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# What names no group of its own gets the default one, which lets nothing through.
resource "aws_default_security_group" "this" {
  count  = local.makes_vpc ? 1 : 0
  vpc_id = aws_vpc.this[0].id
}

resource "aws_subnet" "private" {
  for_each          = local.makes_vpc ? { for index, zone in local.zones : zone => index } : {}
  vpc_id            = aws_vpc.this[0].id
  availability_zone = each.key
  cidr_block        = cidrsubnet(var.network.cidr, 4, each.value)
  tags              = { Name = "${var.name}-private-${each.key}" }
}

resource "aws_subnet" "public" {
  count             = local.makes_vpc ? 1 : 0
  vpc_id            = aws_vpc.this[0].id
  availability_zone = local.zones[0]
  cidr_block        = cidrsubnet(var.network.cidr, 4, 15)
  tags              = { Name = "${var.name}-public" }
}

resource "aws_internet_gateway" "this" {
  count  = local.makes_vpc ? 1 : 0
  vpc_id = aws_vpc.this[0].id
}

resource "aws_eip" "nat" {
  count  = local.makes_vpc ? 1 : 0
  domain = "vpc"
}

resource "aws_nat_gateway" "this" {
  count         = local.makes_vpc ? 1 : 0
  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.public[0].id
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "public" {
  count  = local.makes_vpc ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.this[0].id
  }
}

resource "aws_route_table_association" "public" {
  count          = local.makes_vpc ? 1 : 0
  subnet_id      = aws_subnet.public[0].id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_route_table" "private" {
  count  = local.makes_vpc ? 1 : 0
  vpc_id = aws_vpc.this[0].id
  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.this[0].id
  }
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}

# Weights and checkpoints go to S3 past the NAT gateway, which charges by the gigabyte.
resource "aws_vpc_endpoint" "s3" {
  count           = local.makes_vpc ? 1 : 0
  vpc_id          = aws_vpc.this[0].id
  service_name    = "com.amazonaws.${local.region}.s3"
  route_table_ids = [aws_route_table.private[0].id]
}

# EFA needs all traffic to and from the group itself allowed by name, in both directions.
resource "aws_security_group" "nodes" {
  name_prefix = "${var.name}-nodes-"
  description = "Nodes of training runs: everything among themselves, HTTPS and the VPC outwards"
  vpc_id      = local.vpc_id
  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "among_nodes" {
  description                  = "Ranks, NCCL, EFA"
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "among_nodes" {
  description                  = "Ranks, NCCL, EFA"
  security_group_id            = aws_security_group.nodes.id
  referenced_security_group_id = aws_security_group.nodes.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "https" {
  description       = "S3, ECR, the model hub"
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

data "aws_vpc" "this" {
  id = local.vpc_id
}

resource "aws_vpc_security_group_egress_rule" "vpc" {
  description       = "The metadata service, whichever its port"
  security_group_id = aws_security_group.nodes.id
  cidr_ipv4         = data.aws_vpc.this.cidr_block
  ip_protocol       = "tcp"
  from_port         = 1
  to_port           = 65535
}
