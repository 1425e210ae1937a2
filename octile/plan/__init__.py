"""Plans of training on many GPUs: `octile plan`."""
