"""The scheduler without a model: recorded schedules once more, and simulations."""
