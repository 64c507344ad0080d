"""Three restarts within five minutes, and again later."""

from rustvllm.server.launch.restart_budget import RestartBudget


def test_a_budget_is_used_up_and_comes_back():
    now = 0.0
    budget = RestartBudget(clock=lambda: now)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    assert budget.used == "3 of 3 within 5 minutes"
    now = 300.0
    assert not budget.take()
    now = 301.0
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    now = 1000.0
    assert budget.take()
    assert budget.used == "1 of 3 within 5 minutes"
