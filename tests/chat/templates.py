"""Chat templates, written as those of published models are, but shorter."""

from tokenizers import AddedToken

from octile.tokenizer import Tokenizer

# of DeepSeek-V3.1, with line breaks, and with the tools that vLLM's example template adds to it
V31 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% if not thinking is defined %}{% set thinking = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true, is_last_user=false) %}
{%- for message in messages %}
  {%- if message['role'] == 'system' %}
    {%- if ns.is_first_sp %}
      {%- set ns.system_prompt = ns.system_prompt + message['content'] %}
      {%- set ns.is_first_sp = false %}
    {%- else %}
      {%- set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}
    {%- endif %}
  {%- endif %}
{%- endfor %}
{%- if tools is defined and tools is not none %}
  {%- set tool_ns = namespace(text='## Tools\\n') %}
  {%- for tool in tools %}
    {%- set tool_ns.text = tool_ns.text + (tool | tojson) + '\\n' %}
  {%- endfor %}
  {%- set ns.system_prompt = ns.system_prompt + '\\n\\n' + tool_ns.text %}
{%- endif %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}
    {%- set ns.is_tool = false -%}
    {%- set ns.is_first = false -%}
    {%- set ns.is_last_user = true -%}
    {{- '<｜User｜>' + message['content']}}
  {%- endif %}
  {%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
    {%- if ns.is_last_user %}{{- '<｜Assistant｜></think>'}}{%- endif %}
    {%- set ns.is_last_user = false -%}
    {%- set ns.is_first = false %}
    {%- set ns.is_tool = false -%}
    {%- for tool in message['tool_calls'] %}
      {%- set call = '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'
          + tool['function']['arguments'] + '<｜tool▁call▁end｜>' %}
      {%- if not ns.is_first %}
        {%- if message['content'] is none %}{{- '<｜tool▁calls▁begin｜>' + call}}
        {%- else %}{{- message['content'] + '<｜tool▁calls▁begin｜>' + call}}{%- endif %}
        {%- set ns.is_first = true -%}
      {%- else %}{{- call }}{%- endif %}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}
  {%- endif %}
  {%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
    {%- if ns.is_last_user %}
      {{- '<｜Assistant｜>'}}
      {%- if message['prefix'] is defined and message['prefix'] and thinking %}{{- '<think>'}}
      {%- else %}{{- '</think>'}}{%- endif %}
    {%- endif %}
    {%- set ns.is_last_user = false -%}
    {%- if ns.is_tool %}
      {{- message['content'] + '<｜end▁of▁sentence｜>'}}
      {%- set ns.is_tool = false -%}
    {%- else %}
      {%- set content = message['content'] -%}
      {%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}
      {{- content + '<｜end▁of▁sentence｜>'}}
    {%- endif %}
  {%- endif %}
  {%- if message['role'] == 'tool' %}
    {%- set ns.is_last_user = false -%}
    {%- set ns.is_tool = true -%}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}
  {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}
  {{- '<｜Assistant｜>'}}{%- if not thinking %}{{- '</think>'}}{%- else %}{{- '<think>'}}{%- endif %}
{%- endif %}"""

# of DeepSeek-R1, whose prompts end with a thought's begin and a newline
R1 = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{% if message['role'] == 'assistant' and message['content'] is not none %}
{% set content = message['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# of Kimi-K2
KIMI = """\
{% macro render_content(message) -%}
  {%- set c = message.get('content') -%}
  {%- if c is string %}{{ c }}{%- elif c is not none %}{{ c[0]['text'] }}{%- endif -%}
{%- endmacro %}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  <|im_{{ message['role'] if message['role'] in ('user', 'assistant') else 'system' }}|>
  {{- message['role'] }}<|im_middle|>
  {%- if message['role'] == 'assistant' and message.get('tool_calls') -%}
    {{ render_content(message) }}<|tool_calls_section_begin|>
    {%- for tool_call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>
      {%- if tool_call['function']['arguments'] is string -%}{{ tool_call['function']['arguments'] }}
      {%- else -%}{{ tool_call['function']['arguments'] | tojson }}{%- endif -%}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>
  {%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}
{{ render_content(message) }}
  {%- elif message['content'] is not none -%}{{ render_content(message) }}{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

TOKENS = [  # DeepSeek's, none of which is special in its tokenizer
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>",
]  # fmt: skip


def with_tokens(tokenizer: Tokenizer, special: bool = False) -> Tokenizer:
    """A copy of a tokenizer with DeepSeek's tokens, as special ones or not."""
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in TOKENS])
    return Tokenizer(backend, tokenizer.config)
