"""What the papers found in attention, measured on any model and text: statistics, the survey of a model, figures."""
