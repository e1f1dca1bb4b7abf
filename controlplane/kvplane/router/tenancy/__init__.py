"""Tenants: who asks, what each may use, and how each is kept apart from the others."""
