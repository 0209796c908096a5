-- Gives one owner the right to rebuild. (KEYS: the registry. ARGV: now_us, owner, ttl_us)

if redis.call('HEXISTS', KEYS[1], 'epoch') == 1 then
  return {'ready'}
end
local owner, until_us = redis.call('HGET', KEYS[1], 'owner'), redis.call('HGET', KEYS[1], 'until_us')
if owner and owner ~= ARGV[2] and tonumber(until_us) > now_us then
  return {'busy'}
end
-- Attempts are numbered by the clock, so that one after a loss of the registry has a higher number.
local attempt = math.max(now_us, tonumber(redis.call('HGET', KEYS[1], 'attempt') or '0') + 1)
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'until_us', text(now_us + tonumber(ARGV[3])))
redis.call('HSET', KEYS[1], 'attempt', text(attempt))
return {'begun', attempt}
