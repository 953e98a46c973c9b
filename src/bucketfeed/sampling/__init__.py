"""Which sample comes next: order, division among ranks, cursor. Pure arithmetic."""
