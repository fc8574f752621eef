"""Token budgets, lockstep plans over ranks, and the rows that are forwarded."""
