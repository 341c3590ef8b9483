# The lease table of one application, as leasehold and the Java KCL lay it out. With it in place a worker needs no
# right to make tables: run it with --no-create.

variable "table" {
  description = "The table's name, as in the store URL dynamodb://TABLE: 3 to 255 letters, digits, _ . or -."
  type        = string
}

variable "tags" {
  description = "Tags of the table, by which costs and owners are found."
  type        = map(string)
  default     = {}
}

resource "aws_dynamodb_table" "leases" {
  name         = var.table
  billing_mode = "PAY_PER_REQUEST"
  hash_key     = "leaseKey"

  # The one attribute that has to be declared; all others come with the rows.
  attribute {
    name = "leaseKey"
    type = "S"
  }

  # Checkpoints can be brought back as they were at any second of the last 35 days.
  point_in_time_recovery {
    enabled = true
  }

  # Without its table an application begins anew at its initial position.
  deletion_protection_enabled = true

  tags = merge({ application = var.table, managed-by = "terraform" }, var.tags)
}

output "lease_table_arn" {
  description = "What the policies name as arn:aws:dynamodb:REGION:ACCOUNT:table/TABLE."
  value       = aws_dynamodb_table.leases.arn
}
