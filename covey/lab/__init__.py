"""Commands that analyze runs and configurations, such as compare, plan and explain."""
