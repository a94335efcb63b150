"""The command line: one small file a verb. Nothing heavy is imported before a command needs it.

main           finds the verb's file, turns errors into an exit status
words          options without their value, words that nothing takes
planning       what plan and sweep share
target         TARGET -> model and example inputs (huggingface: those from a configuration)
pipelines      pipeline files for solve
files          files written whole or not at all
plan, show, explain, diff, check, verify, sweep, rules, profile, solve, demo: the verbs
"""
