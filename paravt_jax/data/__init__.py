"""Published data: preparing and reading rows, the order of prompts and their frame budgets, public splits."""
