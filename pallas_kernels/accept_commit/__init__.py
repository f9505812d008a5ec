"""Which drafted tokens stand, the token behind them, and the accepted rows written to paged caches: no host."""
