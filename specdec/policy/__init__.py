"""How much is drafted and verified for each request and step: schedules, cost tables, adaptive decisions."""
