"""What papers claim about losses and estimators, tried on problems small enough to be solved exactly.

Each script takes the functions that training takes (`verl.algorithms`) and prints what was seen, also where the claim
does not show. `benchmarks/results/claims.md` has the figures."""
