"""What people see of a measurement: tables, plots and progress, a module for each product."""
