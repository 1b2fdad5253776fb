"""What the papers found in attention, measured on any model and text: statistics, the survey of a model, figures."""

TOP = 32  # the largest scores whose mass is measured (SparQ fig. 4a)
LEAST_TOKENS = 4 * TOP  # of a piece: queries see at least half of it, of which the top 32 must be a choice
