-- Replaces a hold by what was used.
-- ARGV: now_us, request id, then what was used for each meter number

local packed = redis.call('HGET', keys.holds, ARGV[2])
if not packed then
  return {'gone'}
end
local hold, actual = cmsgpack.unpack(packed), {}
for i = 3, #ARGV do
  actual[i - 2] = tonumber(ARGV[i])
end
for _, held in ipairs(hold.on) do
  if held.hard and actual[held.meter] > held.wanted then
    return {'overrun', held.name, text(held.wanted), text(actual[held.meter])}
  end
end
finish(keys, ARGV[2], hold, now_us, actual)
return {'settled'}
