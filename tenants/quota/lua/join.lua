-- The current epoch, and whether this tenant is part of it. (KEYS: the registry. ARGV: now_us, the tenant's field)

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return {'lost'}
end
redis.call('HSETNX', KEYS[1], ARGV[2], 'joining')
return {redis.call('HGET', KEYS[1], ARGV[2]), epoch}
