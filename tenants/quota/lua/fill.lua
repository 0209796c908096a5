-- Adds a tenant to a rebuild, while no later attempt has begun. (KEYS: the registry. ARGV: now_us, number of the attempt, field)

if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[2] then
  return {'lost'}
end
redis.call('HSET', KEYS[1], ARGV[3], 'in')
return {'in'}
