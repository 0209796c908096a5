-- Counters now, changing nothing.
-- ARGV: now_us, epoch, then for each: its home, its name

if is_lost() then
  return {'lost'}
end
local raws = {}
for i = 3, #ARGV, 2 do
  raws[#raws + 1] = redis.call('HGET', hash_of(ARGV[i]), ARGV[i + 1]) or ''
end
return {'states', now_us, raws}
