"""Looking after a store from outside: check it, copy it, bring a copy back, empty it.

Works on any store through its contract, whether replicas run on it or not.
"""
