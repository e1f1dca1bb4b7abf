"""Commands, configuration and logging: where the parts are put together."""
