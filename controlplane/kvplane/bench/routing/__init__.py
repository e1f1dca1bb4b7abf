"""What a router costs: mock engines, a load generator, and routers side by side in one run."""
