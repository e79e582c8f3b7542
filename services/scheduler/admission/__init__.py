"""Forecasts, deadlines and the refusal of requests that would wait too long."""
