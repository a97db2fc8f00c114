"""Where sandboxes come from: what a provider must offer, the registry, and one folder for each that is built in."""
