"""Files with what a step, a page-in and a load take on a card; `scheduler.simulate.fit` writes them."""
