"""The commands that ask an aggregator about its fleet: `fleet`, `override`, `baseline`."""
