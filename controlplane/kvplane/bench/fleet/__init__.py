"""`kvplane bench fleet`: hundreds of modelled engines around the real decisions, in simulated time."""
