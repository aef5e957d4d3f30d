"""Fusion planners and the schedulers behind them."""
