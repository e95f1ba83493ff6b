"""What was decided and what is measured, for people: report, HTML page, stats, monitor, plots."""
