"""A text on which tokenizers differ: code, numbers, spaces, contractions, scripts, emoji and control characters."""

PROBE = """\
def area(radius: float, n=3) -> float:
\tif radius <= 0.0 or not n:  # no area
\t\traise ValueError(f"radius={radius!r} is not positive")
    return 3.14159265 * radius**2 + sum(x[i:j] for i, j in zip(a, b)) // 0x7FFF_FFFF

class HTTPServer2(BaseServer): __slots__ = ('camelCase', "snake_case_name", 'SCREAMING_CASE')
#include <stdio.h>
for (int i = 0; i != n && *p++; ++i) { printf("%5.2f\\n", v->data[i] / 1e-9); }
<div class="a-b">&nbsp;&lt;1 &amp; 2&gt;</div> {"key": [null, true, -1.5e+10]} SELECT * FROM t WHERE id>=10;

1 12 123 1234 12345 1234567890 1,234,567.89 2024-02-29T23:59:59Z +49-30-1234 100% $9.99 3rd 4x4 v1.2.3 1/2 ½ ² ٣ Ⅷ
I'm you're he's we've they'll she'd don't can't I'M YOU'RE HE'S WE'VE THEY'LL SHE'D DON'T it’s l'été O'Neill rock'n'roll
Hello, world! Hello,world! (hello) [hello] "hello" 'hello' --- ... !!! ??? -> => == != <= >= :: ;; // /* */ ``` ~~~ ###
 one leading space,  two,   three,    four,        eight,                sixteen and trailing ones.\x20\x20\x20
\t tab and space \t\t  mixed \t


three newlines, then carriage returns\r\nand\r\n\r\nno\u00a0break\u2003em space\u3000ideographic space\u200bzero width
 \n  \n\t\n end of blank lines
https://example.org/a_b/c-d?e=f&g=%20h#i user.name+tag@example.com C:\\path\\to\\file /usr/lib/x86_64-linux-gnu

Größe, naïveté, Ångström, façade, São Paulo, Łódź, İstanbul, ﬁne ligature, ＦＵＬＬ width
e\u0301 and \u00e9, A\u030a and \u00c5
Русский текст, Ёлка. Ελληνικά κείμενα. עברית: שלום עולם. العربية: مرحبا بالعالم، ١٢٣. فارسی: می‌خواهم
中文文本，没有空格。日本語のテキスト：ひらがなとカタカナ。한국어 문장입니다. हिन्दी में पाठ, क्षत्रिय। ภาษาไทยไม่มีช่องว่าง
தமிழ் বাংলা ქართული հայերեն አማርኛ မြန်မာ ខ្មែរ Tiếng Việt 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠜎
😀 😃😄 👍🏽 👩\u200d👩\u200d👧 🇩🇪🇫🇷 ❤️ ☃ ™ © € £ ¥ ₹ ∑∫√∞≠≤≥ α²+β³ ← → ↔ █▓▒░ • … – — “quoted” ‘single’ «guillemets»
lowercase UPPERCASE MixedCase iPhone eBay antidisestablishmentarianism aaaaaaaaaaaaaaaaaaaaaaaa
________ ........ ==========
<s> </s> <unk> <pad> <|endoftext|> <|im_start|>user <|begin_of_text|> [CLS] [SEP] [MASK] ▁ Ġ Ċ ## @@ <0x0A> \\u0041
"""
