"""A small enumerable language whose ideal policy is known exactly: task, policy, engine, model and recipe for tests."""
