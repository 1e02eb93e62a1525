"""Choose a plan by measuring: record, measure, plan, verify, try."""
