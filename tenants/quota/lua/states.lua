-- Counters now, changing nothing.
-- ARGV: now_us, then names of counters

local raws = {}
for i = 2, #ARGV do
  raws[i - 1] = redis.call('HGET', keys.counters, ARGV[i]) or ''
end
return {text(now_us), raws}
