-- Counters now, changing nothing.
-- ARGV: now_us, epoch, then names of counters

if is_lost() then
  return {'lost'}
end
local raws = {}
for i = 3, #ARGV do
  raws[i - 2] = redis.call('HGET', keys.counters, ARGV[i]) or ''
end
return {'states', now_us, raws}
