"""What the loader of a pipeline is made of.

In the order in which it uses them: `download` brings the files, `saved_parts` reads their headers,
`dtypes` chooses the types, `memory` adds up what they need, `turns` waits for it, `settings` puts
the parts on their devices; `failures` says what went wrong.
"""
